"""The functional graph: a functional ATen copy of a Dynamo graph, made to be matched on.

The Dynamo graph is replayed on meta tensors and every ATen operator is written down. Views and in-place writes are
resolved on the way, so the copy is pure single assignment: a write through a view becomes ``select_scatter`` and the
like, and later reads see the new value. Nothing is computed, and the Dynamo graph itself stays untouched.

Symbolic sizes are replaced by their hints: the functional graph is one concrete instance (``instances``).
"""

from __future__ import annotations

import functools
import itertools
import logging
import operator
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from kdacompile import compat
from kdacompile.compat import local
from kdacompile.compat.operators import map_tensors, tensors_in, tree_leaves
from kdacompile.graph.ir import Graph, Op, Value
from kdacompile.graph.prefilter import name_of
from kdacompile.graph.recorder import Recorder
from kdacompile.patterns.engine.values import turn
from kdacompile.patterns.engine.vocabulary import AS_IS, ELEMENTWISE, MAKERS, TURNS

log = logging.getLogger(__name__)

META = torch.device("meta")

SizeOf = Callable[[Any], int]
Tables = Mapping[str, torch.Tensor]
"""Inputs of a Dynamo graph, by name, whose values are taken for constants."""


class _Replay:
    """Runs a Dynamo graph under the recorder."""

    def __init__(self, graph: fx.Graph, size_of: SizeOf, tables: Tables) -> None:
        self.graph = graph
        self.size_of = size_of
        self.tables = tables
        self.recorder = Recorder()
        self.env: dict[fx.Node, Any] = {}

    def stand_in(self, value: Any, node: fx.Node | None) -> Any:
        """Meta tensors and plain ints for what a node is known to yield."""
        if isinstance(value, torch.Tensor):
            sizes = [self.size_of(s) for s in value.shape]
            with compat.no_fake_modes():
                try:
                    strides = [self.size_of(s) for s in value.stride()]
                except RuntimeError:  # sparse and jagged tensors have none
                    strides = torch.empty(sizes, device=META).stride()
                tensor = torch.empty_strided(sizes, strides, dtype=value.dtype, device=META)
            self.recorder.add_input(tensor, node, param=isinstance(value, torch.nn.Parameter))
            return tensor
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self.size_of(value)
        if isinstance(value, torch.Size):
            return torch.Size([self.size_of(s) for s in value])
        if isinstance(value, (list, tuple)):  # the node yields none of them alone: a getitem will
            items = [self.stand_in(item, None) for item in value]
            return items if isinstance(value, list) else tuple(items)
        return value

    def opaque(self, node: fx.Node) -> None:
        """Do not look into ``node``: it reads what it is given, yields something new, and may write its arguments."""
        graph, value_of = self.recorder.graph, self.recorder.value_of
        read = [value_of(tensor) for arg in node.all_input_nodes for tensor in tensors_in(self.env.get(arg))]
        graph.outputs.update(read)
        for arg in compat.written_arguments(node):
            for tensor in tensors_in(self.env.get(arg)):
                self.clobber(tensor)
        try:
            self.env[node] = self.stand_in(compat.example_value(node), node)
        except compat.NoHint as error:  # nothing that depends on its size can be looked into either
            log.debug("unknown: %s (%s)", node.format_node(), error)
            return
        if isinstance(self.env[node], torch.Tensor):
            graph.opaque[value_of(self.env[node])] = read

    def clobber(self, tensor: torch.Tensor) -> None:
        """Leave an unknown value in the buffer that ``tensor`` is (a view of)."""
        recorder = self.recorder
        storage = recorder.aliases[id(tensor)].storage
        recorder.values += 1
        value = Value(recorder.values, storage.base.shape, storage.base.dtype)
        recorder.graph.inputs.append(value)
        recorder.overwrite(storage, value)

    def replay(self, node: fx.Node) -> Any:
        loaded: Any = map_arg((node.args, node.kwargs), self.load)
        args, kwargs = _without_devices(loaded)
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": META}
        if node.target in (operator.getitem, operator.setitem) and isinstance(args[0], torch.Tensor):
            args = (args[0], self.places(args[1]), *args[2:])
        mark = self.recorder.mark()
        try:
            result = compat.called(node.target, args, kwargs)
        except RuntimeError:
            # Autocast, which leaves no trace on meta tensors, makes products of mixed dtypes legal.
            wide = _widest_dtype(tensors_in([args, list(kwargs.values())]))
            if wide is None:
                raise
            self.recorder.roll_back(mark)
            result = compat.called(node.target, _widened(args, wide), _widened(kwargs, wide))
        if args and result is args[0] and _moved(node) is not None:
            result = result.clone()
        expected = compat.example_value(node)
        known = isinstance(expected, torch.Tensor) and isinstance(result, torch.Tensor)
        sizes = [s if type(s) is int else self.size_of(s) for s in expected.shape] if known else []
        if known and sizes != list(result.shape) and not _is_reshaped(node):
            raise ValueError("the replay disagrees with Dynamo's own shape")
        if any(made.is_meta and id(made) not in self.recorder.aliases for made in tensors_in(result)):
            raise ValueError("data that no operator made")  # numbers that were put on the meta device are lost
        return result

    def places(self, index: Any) -> Any:
        """An index whose lists of numbers are constants, as torch makes them: on a stand-in's device they are lost."""
        if isinstance(index, tuple):
            return tuple(map(self.places, index))
        if not isinstance(index, list) or not all(type(item) is int for item in tree_leaves(index)):
            return index
        with compat.no_fake_modes():
            data = torch.tensor(index, dtype=torch.long)
            stand_in = torch.empty_like(data, device=META)
        self.recorder.hold(stand_in, data)
        return stand_in

    def load(self, node: fx.Node) -> Any:
        if node not in self.env:
            self.env[node] = self.stand_in(compat.example_value(node), node)
            if node.name in self.tables:
                self.hold_constant(self.env[node], self.tables[node.name])
            self.name_value(node)
        return self.env[node]

    def run_node(self, node: fx.Node) -> None:
        expected = compat.example_value(node)
        if isinstance(expected, torch.SymFloat) and self.run_number(node):
            return
        if not compat.is_value(expected) and not compat.writes_first_argument(node):
            self.run_plain(node, expected)
        elif compat.is_opaque_call(node) or local.touches(node) or not self.loadable(node) or self.brings_data(node):
            self.opaque(node)
        elif isinstance(expected, torch.Tensor) and (numbers := compat.literal(node)) is not None:
            with compat.no_fake_modes():
                data = torch.tensor(numbers, dtype=expected.dtype)
            self.env[node] = self.stand_in(data, node)
            self.hold_constant(self.env[node], data)
        else:
            mark = self.recorder.mark()
            try:
                self.env[node] = self.replay(node)
            except compat.RUN_ERRORS as error:  # no meta kernel, data-dependent, no hint: nobody looks inside
                log.debug("opaque: %s (%s)", node.format_node(), error)
                self.recorder.roll_back(mark)
                self.opaque(node)

    def brings_data(self, node: fx.Node) -> bool:
        """True where numbers that no constants are go from one device to another: an op must not read them before."""
        source = _moved(node)
        return source is not None and not self.recorder.value_of(self.load(source)).const

    def run_number(self, node: fx.Node) -> bool:
        """True for a number that was read of a tensor (``slope.item()``), and for what is computed from such numbers:
        they stand here as tensors without dimensions, which operators promote in the same way.
        """
        read = [self.env[arg] for arg in node.all_input_nodes if isinstance(self.env.get(arg), torch.Tensor)]
        if len(read) != len(node.all_input_nodes) or any(x.numel() != 1 for x in read):
            return False
        mark = self.recorder.mark()
        try:
            if node.target == "item":
                self.env[node] = read[0].reshape(()).to(torch.get_default_dtype())
            else:
                self.env[node] = self.replay(node)
        except compat.RUN_ERRORS:
            self.recorder.roll_back(mark)
            return False
        return True

    def run_plain(self, node: fx.Node, expected: Any) -> None:
        """Numbers are known without running anything; what yields nothing is run for its effects only: not here."""
        if expected is None:
            self.opaque(node)
            return
        try:
            self.env[node] = self.stand_in(expected, node)
        except compat.NoHint as error:
            log.debug("unknown: %s (%s)", node.format_node(), error)

    def loadable(self, node: fx.Node) -> bool:
        return all(arg in self.env or compat.example_value(arg) is not None for arg in node.all_input_nodes)

    def run(self) -> Graph:
        graph, recorder = self.recorder.graph, self.recorder
        with torch.no_grad(), compat.no_fake_modes(), self.recorder:
            for position, node in enumerate(self.graph.nodes):
                recorder.node, recorder.position = node, position
                if node.op == "get_attr":
                    self.load_attribute(node)
                elif node.op in ("call_function", "call_method"):
                    if compat.is_mode_switch(node):
                        recorder.grad = compat.grad_mode_after(node, recorder.grad)
                        continue
                    self.run_node(node)
                elif node.op == "call_module":
                    self.opaque(node)
                elif node.op == "output":
                    self.finish(node)
                self.name_value(node)
        drop_unread(graph)
        mark_uniform(graph)
        _mark_weights(graph)
        return graph

    def load_attribute(self, node: fx.Node) -> None:
        value = compat.attribute(self.graph.owning_module, node)
        if not isinstance(value, torch.Tensor):
            return
        self.env[node] = self.stand_in(value, node)
        if compat.is_graph_constant(node):
            self.hold_constant(self.env[node], value)

    def hold_constant(self, stand_in: torch.Tensor, data: torch.Tensor) -> None:
        value = self.recorder.value_of(stand_in)
        value.const, value.payload = True, data

    def name_value(self, node: fx.Node) -> None:
        """Remember which Dynamo node yields a value, and on which storage it sits."""
        tensor = self.env.get(node)
        if not isinstance(tensor, torch.Tensor) or node.target is operator.setitem:
            return
        if isinstance(compat.example_value(node), torch.SymFloat):
            return
        value = self.recorder.value_of(tensor)
        if value.node is None:
            value.node = node
        self.recorder.graph.names.setdefault(value, []).append((node, self.recorder.position))
        alias = self.recorder.aliases[id(tensor)]
        if not alias.chain and node not in alias.storage.nodes:
            alias.storage.nodes.append(node)  # beside the buffer's own: a cast that changes nothing, say
        self.recorder.graph.storages[node] = alias.storage.index

    def finish(self, node: fx.Node) -> None:
        graph = self.recorder.graph
        for arg in node.all_input_nodes:
            if arg.op == "placeholder":
                self.load(arg)
            graph.outputs.update(map(self.recorder.value_of, tensors_in(self.env.get(arg))))
        for storage in self.recorder.storages:
            if storage.generation and storage.source is not None:
                before = next(v for v in graph.inputs if v.node is storage.source)
                graph.written[storage.base] = (storage.source, before)


def drop_unread(graph: Graph) -> None:
    """Remove what nothing reads: re-taken views, autograd's own copies, writes to a buffer no longer read."""
    keep: list[Op] = []
    dropped: set[Any] = set()
    for op in reversed(graph.ops):
        if any(value.users or value in graph.outputs or value in graph.written for value in op.outs):
            keep.append(op)
            continue
        dropped.add(op.node)
        for value in op.reads:
            value.users.remove(op)
    graph.ops = keep[::-1]
    graph.dead = dropped - {op.node for op in keep}


def _mark_weights(graph: Graph) -> None:
    """Matrices among the inputs are weights, unless there is nothing else: then one head is written without a batch."""
    inputs = [value for value in graph.inputs if not value.const]
    if any(value.param or len(value.shape) > 2 or not value.dtype.is_floating_point for value in inputs):
        for value in inputs:
            value.weight = len(value.shape) == 2


def _moved(node: fx.Node) -> fx.Node | None:
    """What goes to another device here, if something does. Stand-ins have one device: on it there is nothing to do."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or name_of(node) in MAKERS | ELEMENTWISE:
        return None
    made, given = compat.example_value(node), compat.example_value(source)
    both = isinstance(made, torch.Tensor) and isinstance(given, torch.Tensor)
    return source if both and made.device != given.device else None


def _is_reshaped(node: fx.Node) -> bool:
    """True if a method writes to what the node yields: ``unsqueeze_`` changes the shape that Dynamo keeps for it."""
    methods = [str(user.target) for user in node.users if user.op == "call_method" and user.args[:1] == (node,)]
    return any(name.endswith("_") and not name.endswith("__") for name in methods)


def _without_devices(tree: Any) -> Any:
    """Arguments with every device replaced by that of tensors without data."""
    if isinstance(tree, (torch.Tensor, int, float)):
        return tree
    if isinstance(tree, torch.device):
        return META
    if isinstance(tree, dict):
        return {key: _without_devices(item) for key, item in tree.items()}
    if isinstance(tree, list) or type(tree) is tuple:
        items = map(_without_devices, tree)
        return list(items) if isinstance(tree, list) else tuple(items)
    return tree


def _widest_dtype(tensors: list[torch.Tensor]) -> torch.dtype | None:
    """What floating tensors of different dtypes promote to; None if they agree."""
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    return functools.reduce(torch.promote_types, dtypes) if len(dtypes) > 1 else None


def _widened(tree: Any, dtype: torch.dtype) -> Any:
    return map_tensors(tree, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def functional_graph(graph: fx.Graph, size_of: SizeOf = compat.size_hint, tables: Tables | None = None) -> Graph:
    """The functional graph of a Dynamo graph; ``size_of`` maps symbolic sizes to the instance's ints (default: their
    hints). Inputs in ``tables`` are taken for constants with these data: whoever does that must see to it that they
    are.
    """
    return _Replay(graph, size_of, tables or {}).run()


# -- dimensions along which a value is the same by construction -------------------------------------------------------
# Expanded ones, and pointwise functions of those. Models expand a step size or a bias to the shape of the state
# before an activation; the recurrence wants the tensor before the expand. One entry of a uniform dimension stands for
# all of them.

ALIKE = ELEMENTWISE | AS_IS | {"_to_copy", "expand", "repeat"}
"""Operators whose result varies along a dimension, counted from the right, where something that they read does."""


def mark_uniform(graph: Graph) -> None:
    """Fill in ``Value.uniform`` for every value of ``graph``."""
    for op in graph.ops:
        op.out.uniform = frozenset(_of(op))
        if op.name in ("split", "split_with_sizes"):
            for out in op.outs:
                out.uniform = op.reads[0].uniform


def _of(op: Op) -> Iterable[int]:
    shape = op.out.shape
    if op.name in ALIKE and op.reads:
        return (d for d in range(len(shape)) if shape[d] > 1 and all(_same(v, d - len(shape)) for v in op.reads))
    if op.name == "cat" and op.reads:
        along = op.args[1] % len(shape) if len(op.args) > 1 else 0
        return (d for d in range(len(shape)) if d != along and all(d in v.uniform for v in op.reads))
    source = op.reads[0] if len(op.reads) == 1 else None
    if source is None or not source.uniform:
        return ()
    if op.name == "slice":
        return source.uniform
    if op.name == "unsqueeze":
        at = op.args[1] % (len(source.shape) + 1)
        return (d + (d >= at) for d in source.uniform)
    return (i for i, d in enumerate(turn(op)) if d in source.uniform) if op.name in TURNS else ()


def _same(value: Value, from_right: int) -> bool:
    """True if ``value`` does not vary along the dimension counted from the right."""
    dim = len(value.shape) + from_right
    return dim < 0 or value.shape[dim] == 1 or dim in value.uniform


# -- inputs that share memory -----------------------------------------------------------------------------------------
# Writing one changes the other, which the functional graph cannot see: there every input is a buffer of its own. Dynamo
# hands such inputs over as they are and AOTAutograd takes care of them afterwards; it also guards which inputs overlap.
# So a graph that overwrites one of them is left alone as a whole.

MOST_WORK = 1 << 20
"""What is tried to find an element that two views share; views that take more count as overlapping."""


def overwritten(functional: Graph, nodes: Iterable[fx.Node]) -> fx.Node | None:
    """What the graph writes while something else lies, in part, in the same memory: an input beside another input, what
    a call on a tensor subclass has yielded.
    """
    written = {mutation.storage for mutation in functional.mutations}
    if not written:
        return None
    nodes = list(nodes)
    for node in nodes:
        inside = local.is_wrapped(compat.example_value(node)) or local.touches(node)
        if inside and functional.storages.get(node) in written:
            return node
    shared: dict[Any, list[tuple[fx.Node, torch.Tensor]]] = {}
    for node in nodes:
        value = compat.example_value(node)
        if node.op in ("placeholder", "get_attr") and isinstance(value, torch.Tensor):
            shared.setdefault(compat.memory_of(value), []).append((node, value))
    for inputs in shared.values():
        for pair in itertools.combinations(inputs, 2):
            target = next((node for node, _ in pair if functional.storages.get(node) in written), None)
            if target is not None and overlap(pair[0][1], pair[1][1]):
                return target
    return None


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True unless two views of one storage have no element in common (their sizes must be fixed to tell)."""
    if any(compat.free_symbols(view) for view in (one, other)):
        return True
    try:
        import numpy  # torch runs without it
    except ImportError:
        return True
    try:
        return numpy.shares_memory(*(numpy.asarray(_addresses(view)) for view in (one, other)), max_work=MOST_WORK)
    except RuntimeError:  # more work than that
        return True


def _addresses(view: torch.Tensor) -> SimpleNamespace:
    """What numpy makes an array of that lies as the view does, at addresses that nobody reads."""
    size = view.dtype.itemsize
    steps = tuple(int(stride) * size for stride in view.stride())
    start = (int(view.storage_offset()) + 1) * size  # no array is at address 0
    facts = {"data": (start, True), "shape": tuple(map(int, view.shape)), "strides": steps, "typestr": f"|V{size}"}
    return SimpleNamespace(__array_interface__={**facts, "version": 3})

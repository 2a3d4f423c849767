"""The operations of HIVM as Python closures, decoded once and run many times."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from .library import call
from .machine import Core, Run
from .memory import DTYPES, DYNAMIC, View, contiguous, memref_type
from .parse import Block, Op, UnsupportedError

Env = dict[str, Any]
Step = Callable[[Env, Core], None]

_FLOATS = ("f32", "f16", "bf16")
_COMPARISONS: tuple[Callable[[Any, Any], bool], ...] = (
    lambda x, y: x == y,
    lambda x, y: x != y,
    lambda x, y: x < y,
    lambda x, y: x <= y,
    lambda x, y: x > y,
    lambda x, y: x >= y,
)
_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "addi": lambda x, y: x + y,
    "subi": lambda x, y: x - y,
    "muli": lambda x, y: x * y,
    "divsi": lambda x, y: abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1),
    "remsi": lambda x, y: abs(x) % abs(y) * (-1 if x < 0 else 1),
    "minsi": min,
    "maxsi": max,
    "ori": lambda x, y: x | y,
    "andi": lambda x, y: x & y,
    "xori": lambda x, y: x ^ y,
    "shli": lambda x, y: x << y,
    "shrsi": lambda x, y: x >> y,
    "addf": lambda x, y: x + y,
    "subf": lambda x, y: x - y,
    "mulf": lambda x, y: x * y,
    "divf": lambda x, y: x / y,
}
_NOTHING = ("func.return", "hivm.hir.set_ffts_base_addr", "hivm.hir.set_mask_norm")
_PURE = (
    "arith.constant",
    "hivm.hir.pointer_cast",
    "memref.cast",
    "memref.collapse_shape",
    "memref.expand_shape",
    "memref.subview",
)


class Code:
    """A decoded block: straight steps run at once, what may block runs as a generator."""

    def __init__(self) -> None:
        self.steps: list[Step | Blocking] = []
        self.results: tuple[str, ...] = ()

    @property
    def blocks(self) -> bool:
        return any(isinstance(step, Blocking) for step in self.steps)

    def run(self, env: Env, core: Core) -> Run:
        for step in self.steps:
            if isinstance(step, Blocking):
                yield from step.run(env, core)
            else:
                step(env, core)

    def run_at_once(self, env: Env, core: Core) -> None:
        for step in self.steps:
            assert not isinstance(step, Blocking)
            step(env, core)


class Blocking:
    """A step in which a core may have to wait for another one."""

    def run(self, env: Env, core: Core) -> Run:
        raise NotImplementedError


class Wait(Blocking):
    def __init__(self, pipe: str, flag: Callable[[Env], int]) -> None:
        self.pipe, self.flag = pipe, flag

    def run(self, env: Env, core: Core) -> Run:
        while not core.flags.take(core, self.pipe, self.flag(env)):
            yield False
        yield True


class Loop(Blocking):
    def __init__(self, op: Op, code: Code) -> None:
        self.op, self.code, self.arguments = op, code, op.regions[0].arguments

    def run(self, env: Env, core: Core) -> Run:
        for _ in self._turns(env):
            yield from self.code.run(env, core)

    def run_at_once(self, env: Env, core: Core) -> None:
        for _ in self._turns(env):
            self.code.run_at_once(env, core)

    def _turns(self, env: Env) -> Any:
        low, high, step = (env[name] for name in self.op.operands[:3])
        carried = [env[name] for name in self.op.operands[3:]]
        for index in range(low, high, step):
            env[self.arguments[0]] = index
            env.update(zip(self.arguments[1:], carried, strict=True))
            yield
            carried = [env[name] for name in self.code.results]
        env.update(zip(self.op.results, carried, strict=True))


class Branch(Blocking):
    def __init__(self, op: Op, codes: list[Code]) -> None:
        self.op, self.codes = op, codes

    def _taken(self, env: Env) -> Code | None:
        if env[self.op.operands[0]]:
            return self.codes[0]
        return self.codes[1] if len(self.codes) > 1 else None

    def run(self, env: Env, core: Core) -> Run:
        if code := self._taken(env):
            yield from code.run(env, core)
            self._bind(env, code)

    def run_at_once(self, env: Env, core: Core) -> None:
        if code := self._taken(env):
            code.run_at_once(env, core)
            self._bind(env, code)

    def _bind(self, env: Env, code: Code) -> None:
        env.update(zip(self.op.results, [env[name] for name in code.results], strict=True))


class Decoder:
    """Decodes a function. What depends on nothing but constants is moved to the front and runs once."""

    def __init__(self, maps: dict[str, str]) -> None:
        self._maps = maps
        self._constant: set[str] = set()
        self._front: list[Step | Blocking] = []

    def function(self, function: Op) -> Code:
        self._constant, self._front = set(), []
        code = self.block(function.regions[0])
        code.steps[:0] = self._front
        return code

    def block(self, block: Block) -> Code:
        code = Code()
        for op in block.ops:
            if op.name == "scf.yield":
                code.results = op.operands
            elif op.name in _PURE and self._constant.issuperset(op.operands):
                self._constant.update(op.results)
                self._front.append(self.step(op))
            elif op.name not in _NOTHING:
                code.steps.append(self.step(op))
        return code

    def step(self, op: Op) -> Step | Blocking:
        if op.name in ("scf.for", "scf.if"):
            codes = [self.block(region) for region in op.regions]
            node = Loop(op, codes[0]) if op.name == "scf.for" else Branch(op, codes)
            return node if any(code.blocks for code in codes) else node.run_at_once
        if op.name == "hivm.hir.sync_block_wait":
            return Wait(_pipe(op), _number(op, r"static_flag_id = (\d+)"))
        family, _, name = op.name.rpartition(".")
        handler = {"arith": _arith, "affine": self._affine, "memref": _memref, "hivm.hir": _hivm}.get(family)
        if op.name == "func.call":
            return _call(op)
        if handler is None:
            raise UnsupportedError(op.name)
        return handler(op, name)

    def _affine(self, op: Op, name: str) -> Step:
        text = op.get(r"map = (#map\d*|affine_map<.*?>>?)")
        function = _affine_function(self._maps.get(text) or text.removeprefix("affine_map<").removesuffix(">"))
        pick: Callable[..., int] = {"apply": lambda v: v[0], "min": min, "max": max}[name]
        return _assign(op, lambda *values: pick(function(*values)))


def _assign(op: Op, function: Callable[..., Any]) -> Step:
    result, operands = op.results[0], op.operands

    def step(env: Env, core: Core) -> None:
        env[result] = function(*[env[name] for name in operands])

    return step


def _affine_function(text: str) -> Callable[..., tuple[int, ...]]:
    found = re.match(r"\(([^)]*)\)(?:\[([^\]]*)\])? -> \((.*)\)$", text)
    if found is None:
        raise UnsupportedError(f"affine map {text}")
    names = ", ".join(part for part in found.group(1, 2) if part)
    body = re.sub(r"(\([^()]*\)|\w+) ceildiv (\w+)", r"(-(-\1 // \2))", found.group(3))
    if "ceildiv" in body:
        raise UnsupportedError(f"affine map {text}")
    body = body.replace("floordiv", "//").replace(" mod ", " % ")
    return eval(f"lambda {names}: ({body},)")  # the compiler's own text, parsed above


def _number(op: Op, pattern: str) -> Callable[[Env], int]:
    """A number given in the text, or else as the last operand."""
    static = op.find(pattern)
    if static is not None:
        value = int(static)
        return lambda env: value
    name = op.operands[-1]
    return lambda env: int(env[name])


def _pipe(op: Op) -> str:
    return op.get(r"\bpipe = #hivm.pipe<PIPE_(\w+)>")


def _arith(op: Op, name: str) -> Step:
    if name == "constant":
        value = _constant(op)
        return lambda env, core: env.__setitem__(op.results[0], value)
    if name == "cmpi":
        compare = _COMPARISONS[_predicate(op)]
        return _assign(op, compare)
    if name == "select":
        return _assign(op, lambda condition, x, y: x if condition else y)
    if name in ("index_cast", "index_castui", "extsi", "extui", "trunci"):
        return _assign(op, _integer_cast(op.type))
    if name == "sitofp":
        return _assign(op, DTYPES[op.type].type)
    if name in _ARITHMETIC:
        return _assign(op, _ARITHMETIC[name])
    raise UnsupportedError(op.name)


def _predicate(op: Op) -> int:
    predicate = int(op.get(r"predicate = (\d+)"))
    if predicate >= len(_COMPARISONS):
        raise UnsupportedError("unsigned comparison")
    return predicate


def _integer_cast(target: str) -> Callable[[Any], Any]:
    if target == "i1":
        return lambda x: bool(int(x) & 1)
    if target == "i32":
        return lambda x: (int(x) + 2**31) % 2**32 - 2**31
    return int


def _constant(op: Op) -> Any:
    text, kind = op.get(r"value = ([^:>]+?)(?: : \w+)?}?>"), op.type
    if text in ("true", "false"):
        return text == "true"
    if kind not in _FLOATS:
        return int(text)
    if text.startswith("0x"):
        bits = np.uint32 if kind == "f32" else np.uint16
        return np.array([int(text, 16)], bits).view(DTYPES[kind])[0]
    return DTYPES[kind].type(float(text))


def _memref(op: Op, name: str) -> Step:
    if name == "cast":
        return _assign(op, lambda x: x)
    if name in ("collapse_shape", "expand_shape"):
        grouping = op.get(r"reassociation = \[(\[.*?\])\]")
        groups = [[int(i) for i in part.split(",")] for part in re.findall(r"\[(\d[\d, ]*)\]", grouping)]
        if name == "collapse_shape":
            return _assign(op, lambda x: x.collapse(groups))
        sizes = op.integers("static_output_shape")
        return _assign(op, lambda x: x.expand(groups, sizes))
    if name in ("subview", "reinterpret_cast"):
        return _part(op, name)
    if name == "view":
        sizes, dtype = memref_type(op.type)
        strides = contiguous(sizes, dtype.itemsize)
        return _assign(op, lambda x, shift: View(x.buffer, dtype, x.offset + shift, sizes, strides))
    if name == "load":
        return _scalar_load(op)
    if name == "store":
        return _scalar_store(op)
    raise UnsupportedError(op.name)


def _scalar_load(op: Op) -> Step:
    (result,), operands = op.results, op.operands

    def load(env: Env, core: Core) -> None:
        source, *index = (env[word] for word in operands)
        found = source.array[tuple(index)]
        core.clocks.instruction(core.name, "S", "load", [source.element(index)], [])
        env[result] = int(found) if np.issubdtype(found.dtype, np.integer) else found

    return load


def _scalar_store(op: Op) -> Step:
    operands = op.operands

    def store(env: Env, core: Core) -> None:
        value, target, *index = (env[word] for word in operands)
        target.array[tuple(index)] = value
        core.clocks.instruction(core.name, "S", "store", [], [target.element(index)])

    return store


def _part(op: Op, name: str) -> Step:
    """subview, and reinterpret_cast, whose offset and strides are absolute."""
    static = [op.integers(f"static_{word}") for word in ("offsets", "sizes", "strides")]
    rank = len(memref_type(op.type)[0])

    def part(x: View, *dynamic: int) -> View:
        rest = iter(dynamic)
        offsets, sizes, strides = ([next(rest) if n == DYNAMIC else n for n in words] for words in static)
        if name == "subview":
            return x.subview(offsets, sizes, strides, rank)
        item = x.dtype.itemsize
        scaled = tuple(stride * item for stride in strides)
        return View(x.buffer, x.dtype, offsets[0] * item, tuple(sizes), scaled)

    return _assign(op, part)


def _hivm(op: Op, name: str) -> Step:
    if name == "pointer_cast":
        sizes, dtype = memref_type(op.type)
        space, strides = op.get(r"-> .*address_space<(\w+)>"), contiguous(sizes, dtype.itemsize)
        result, operand = op.results[0], op.operands[0]
        return lambda env, core: env.__setitem__(result, View(core.memory[space], dtype, env[operand], sizes, strides))
    if name in ("get_block_idx", "get_sub_block_idx"):
        attribute, result = ("block" if name == "get_block_idx" else "sub_block"), op.results[0]
        return lambda env, core: env.__setitem__(result, getattr(core, attribute))
    if name in ("set_flag", "wait_flag"):
        source, target = op.get(r"set_pipe = #hivm.pipe<PIPE_(\w+)>"), op.get(r"wait_pipe = #hivm.pipe<PIPE_(\w+)>")
        event = _number(op, r"static_event_id = #hivm.event<EVENT_ID(\d+)>")
        return lambda env, core: getattr(core, name)(source, target, event(env))
    if name == "sync_block_set":
        static, pipe = op.find(r"static_flag_id = (\d+)"), op.get(r"\btpipe = #hivm.pipe<PIPE_(\w+)>")
        flag = int(static) if static is not None else op.operands[0]
        return lambda env, core: core.flags.set(core, pipe, flag if isinstance(flag, int) else env[flag])
    if name == "pipe_barrier":
        pipe = _pipe(op)
        return lambda env, core: core.clocks.barrier(core.name, pipe)
    raise UnsupportedError(op.name)


def _call(op: Op) -> Step:
    callee, operands = op.get(r"callee = @(\w+)"), op.operands
    function, pipe, target = call(callee)

    def step(env: Env, core: Core) -> None:
        core.calls[callee] += 1
        values = [env[name] for name in operands]
        before = values[target].read().tobytes() if pipe == "MTE3" else None
        function(core, values)
        if pipe:
            same = before is not None and before == values[target].read().tobytes()
            core.clocks.instruction(core.name, pipe, callee, values[:target], values[target:], same=same)

    return step

"""The linear-attention op in the place of a proven region: its arguments, its form, and where the state goes."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from kdacompile import compat
from kdacompile.graph import gradient
from kdacompile.lowering.cpu import costs
from kdacompile.lowering.cpu.recurrence_cost import Region, is_estimated
from kdacompile.lowering.cpu.step_cost import least_states
from kdacompile.ops.signature import LINEAR_ATTENTION, LINEAR_ATTENTION_STEP, LINEAR_ATTENTION_STEP_
from kdacompile.patterns.engine.placement import Placement
from kdacompile.patterns.recurrence.roles import AXES, Recurrence
from kdacompile.rewrite.measured import Work, is_as_measured, is_half, size_of, takes_longer, work_of
from kdacompile.rewrite.splice import CannotSplice, Splice


class LinearAttentionSplice(Splice[Recurrence]):
    """One rewrite: ``check`` everything, then ``apply``."""

    def check(self) -> fx.Node:
        if self.match.mode == "step" and "u" in self.match.inputs:  # 50 us as it is, 290 us as two tokens of the op
            raise CannotSplice("cost", "one token that reads the state before its own write is faster as it is")
        return super().check()

    def check_cost(self, *, inductor: bool) -> None:
        """Calls on a CPU are what was measured, beside what Inductor makes of the code."""
        if not inductor:
            return
        if self.match.mode == "step" and not self.records_gradient():
            self._check_step()
        elif is_as_measured(self.match.binding.inputs, free="BT"):
            reason = takes_longer(self.match.binding.inputs, self._ratio, train=self.records_gradient())
            if reason:
                raise CannotSplice("cost", reason)

    def _check_step(self) -> None:
        """Steps of a batch of any size up to which they are faster as they are, which is guarded."""
        binding, sizes = self.match.binding, self.match.sizes
        if not is_as_measured(binding.inputs, free="B"):
            return
        alone = math.prod(sizes[axis] for axis in "HKV")
        limit = -(-least_states(binding.gate, binding.delta) // alone)
        if compat.stays_below(size_of(binding.inputs, "B"), limit):
            what = f"one token over {sizes['B'] * alone} numbers of state on a CPU"
            raise CannotSplice("cost", f"{what}: less than the call of an op takes")

    def _ratio(self, requests: int, tokens: int) -> float | None:
        """How many times as long as the model's own code the op takes, of so many tokens; None where it takes less, and
        where nothing alike was measured.
        """
        sizes = self.match.checked.sizes
        work = work_of(self.match.candidate.ops, {sizes["B"]: requests, sizes["T"]: tokens})
        return costs.loses(self._region(work, requests * tokens)) if is_estimated(work.operators, tokens) else None

    def _region(self, work: Work, tokens: int) -> Region:
        """The model's own code, as the cost model takes it."""
        binding = self.match.checked
        rows, state = tokens * binding.sizes["H"], binding.sizes["K"] * binding.sizes["V"]
        how = {"delta": binding.delta, "train": self.records_gradient(), "half": is_half(binding.inputs)}
        return Region(*work[1:], rows * binding.writes, state, **how)

    def apply(self, before: fx.Node) -> str:
        """Insert the op before ``before``, redirect the outputs, erase the region. Returns the op's name."""
        match, like = self.match, self.match.output.value.node
        with self.graph.inserting_before(before):
            v = self.canonical(match.inputs["v"])
            others = {role: placement for role, placement in match.inputs.items() if role != "v"}
            args: dict[str, fx.Node | None] = {role: self.canonical(item) for role, item in others.items()}
            args["v"] = v
            if match.binding.writes > 1:
                self.spread(args)
            args["g"] = self.gate(args.get("g"), args.pop("rate", None), v)
            for role in ("beta", "initial_state"):  # all requests may start from one state (a parameter)
                given = args.get(role)
                args[role] = None if given is None else self.expanded(given, v, AXES[role])
            args.update(self.gate_parameters(args))
            bonus = self.bonus(args.pop("u"), args) if "u" in args else None
            decay = self.own_decay(args) if match.binding.reads == "between" else None
            if match.binding.reads != "after":
                self.shift(args)
            if self.overwrites_cache(before):
                call = self.call(LINEAR_ATTENTION_STEP_, args, v)
                self.redirect(match.output, call, like)
            else:
                if match.mode == "step":
                    call = self.call(LINEAR_ATTENTION_STEP, args, v)
                else:
                    beside = decay if bonus is None else bonus
                    wide = None if beside is None else compat.example_value(beside).dtype  # rounded once, as the sum
                    call = self.call(LINEAR_ATTENTION, args, v, wide, chunk_size=0, **self.layout())
                result = self.getitem(call, 0, like)
                if match.binding.writes > 1:
                    each = self.method(result, "unflatten", 1, (-1, match.binding.writes))
                    result = self.method(each, "select", 2, -1)
                if match.binding.reads != "after":
                    result = self.method(result, "narrow", 1, 0, self.size(v, 1))
                for function, other in ((operator.mul, decay), (operator.add, bonus)):
                    if other is not None:
                        result = self.with_meta(self.graph.call_function(function, (result, other)), like)
                self.redirect(match.output, result, like)
                if self.final is not None:
                    self.place_state(self.getitem(call, 1, like), self.final)
        self.erase()
        return str(call.target).removesuffix(".default").replace(".", "::")

    def canonical(self, placement: Placement) -> fx.Node:
        node = super().canonical(placement)
        node = self.method(node, "flatten", 1, 2) if "R" in placement.order else node
        return self.method(node, "to", torch.float32) if placement.role in self.match.upcast else node

    def expanded(self, node: fx.Node, like: fx.Node, axes: str) -> fx.Node:
        """Broadcast size-one dimensions of a gate or beta to v's batch, tokens and heads."""
        order = AXES["v"]
        wanted: list[Any] = []
        for index, axis in enumerate(axes):
            have = compat.example_value(node).shape[index]
            grows = axis in order and isinstance(have, int) and have == 1
            wanted.append(self.size(like, order.index(axis)) if grows else -1)
        return node if all(w == -1 or w == 1 for w in wanted) else self.method(node, "expand", *wanted)

    def gate(self, node: fx.Node | None, rate: fx.Node | None, v: fx.Node) -> fx.Node | None:
        match = self.match
        if node is not None and rate is not None:
            rate = self.method(rate, "unsqueeze", -1)
            node = self.with_meta(self.graph.call_function(operator.mul, (node, rate)), v)
        if match.binding.decay:
            like = compat.example_value(v)
            dtype = torch.promote_types(like.dtype, torch.float32)
            logs = torch.tensor(match.binding.decay, dtype=torch.float64).log().tolist()
            new = self.graph.call_function(torch.tensor, (logs,), {"dtype": dtype, "device": like.device})
            return self.with_meta(new, v)
        if node is None:
            return None
        node = self.in_unit(node)
        if match.binding.gate == "head":  # [1, 1, H, 1]
            node = self.expanded(node, v, "..H.")
            return self.method(node, "flatten")
        node = self.expanded(node, v, "BTHK")
        return self.method(node, "squeeze", 3) if match.binding.gate == "token" and _rank(node) == 4 else node

    def bonus(self, bonus: fx.Node | None, args: dict[str, fx.Node | None]) -> fx.Node:
        """``scale (q_t u k_t) v_t``, ``[B, T, H, V]``: what a token reads of its own write."""
        q, k, v = (args[role] for role in ("q", "k", "v"))
        assert bonus is not None and q is not None and k is not None and v is not None
        wide = torch.promote_types(compat.example_value(q).dtype, torch.float32)
        weights = self.method(self.method(q, "to", wide), "mul", k)
        weights = self.method(self.method(self.method(weights, "mul", bonus), "sum", -1), "unsqueeze", -1)
        own = self.method(weights, "mul", v)
        return own if self.match.binding.scale == 1.0 else self.method(own, "mul", self.match.binding.scale)

    def own_decay(self, args: dict[str, fx.Node | None]) -> fx.Node | None:
        """What the op's result is multiplied with where a token reads the state with its own decay; of a decay per
        channel, its query is, which is not rounded again.
        """
        q, g = args["q"], args["g"]
        assert q is not None and g is not None
        wide = torch.promote_types(compat.example_value(q).dtype, torch.float32)
        factor = self.method(g, "to", wide)
        factor = factor if self.match.binding.gate_fn == "factor" else self.method(factor, "exp")
        if self.match.binding.gate != "channel":
            return self.method(factor, "unsqueeze", -1)
        for role in "qkv":
            given = args[role]
            assert given is not None
            args[role] = self.method(given, "to", wide)
        args["q"] = self.method(factor, "mul", args["q"])
        return None

    def shift(self, args: dict[str, fx.Node | None]) -> None:
        """The op gets the keys, values and gates of the token before each query, and reads the state before a write::

        q_1 .. q_T  0        0  k_1 .. k_T        0  v_1 .. v_T        1  exp(g_1) .. exp(g_T)
        """
        for role, filler in (("k", 0.0), ("v", 0.0), ("beta", 0.0), ("g", self.no_decay)):
            given = args.get(role)
            if given is not None and (role != "g" or _rank(given) > 1):
                args[role] = self.padded(given, 1, 0, filler)
        q = args["q"]
        assert q is not None
        args["q"] = self.padded(q, 0, 1)

    @property
    def no_decay(self) -> float:
        return 1.0 if self.match.binding.gate_fn == "factor" else 0.0

    def spread(self, args: dict[str, fx.Node | None]) -> None:
        """A token of the op for each of several writes: the first decays, the last reads::

        q    0  ..  0  q_1    0  ..  0  q_2 ..        g    g_1  0  ..  0    g_2  0  ..  0 ..
        """
        more, q, g = self.match.binding.writes - 1, args["q"], args.get("g")
        assert q is not None
        if g is not None:
            every = self.method(g, "expand", -1, self.size(q, 1), -1, -1)
            each = self.padded(self.method(every, "unsqueeze", 2), 0, more, self.no_decay, dim=2)
            args["g"] = self.method(each, "flatten", 1, 2)
        args["q"] = self.method(self.padded(self.method(q, "unsqueeze", 2), more, 0, dim=2), "flatten", 1, 2)

    def padded(self, node: fx.Node, before: int, after: int, filler: float = 0.0, dim: int = 1) -> fx.Node:
        """``node`` with ``filler`` put in front of it or behind it, tokens by default."""
        behind = (0, 0) * (_rank(node) - 1 - dim)
        new = self.graph.call_function(torch.nn.functional.pad, (node, [*behind, before, after]), {"value": filler})
        return self.with_meta(new, self.match.output.value.node)

    def in_unit(self, node: fx.Node) -> fx.Node:
        """The log gate from a tensor that holds it with another sign or to another base."""
        if self.match.binding.gate_rate == 1.0:
            return node
        if self.match.binding.gate_rate == -1.0:
            return self.method(node, "neg")
        if compat.example_value(node).dtype.itemsize < 4:  # the product is not rounded again
            node = self.method(node, "to", torch.float32)
        return self.method(node, "mul", self.match.binding.gate_rate)

    def overwrites_cache(self, before: fx.Node) -> bool:
        """True if the step's only use of the new state is to overwrite the old one: then it can be done in place."""
        state = self.match.inputs.get("initial_state")
        if state is None or self.final is None or self.match.mode != "step" or self.records_gradient():
            return False
        cache = state.value.node
        if state.role in self.match.upcast or gradient.wants_gradient(cache):
            return False
        views = {"permute"} if self.writes_views else set[str]()  # Mamba-2's has V before K
        if not views.issuperset(name for name, _ in state.steps(self.match.sizes)):
            return False
        if self.final.axes != state.axes or cache.op != "placeholder":
            return False
        if self.state_in_place:
            return self.final.value.node is cache
        copies = {user for _, user in self.later_users(self.final.value)} | {copy for copy, _ in self.stores}
        stores = all(copy.target == "copy_" and copy.args[0] is cache and not copy.users for copy in copies)
        if not copies or not stores:
            return False
        last = max(self.place[copy] for copy in copies)
        storage = self.storages.get(cache)
        views = {cache, *(node for node, own in self.storages.items() if own == storage)}
        users = {user for view in views for user in view.users if user in self.place} - copies - self.dying
        if any(self.place[before] <= self.place[user] <= last for user in users):
            return False
        self.dying |= copies
        return True

    def gate_parameters(self, args: dict[str, Any]) -> dict[str, fx.Node]:
        """A_log as [H] and dt_bias as [H] or, for a gate per channel, [H, K]."""
        sizes, found = self.match.sizes, {}
        if "A_log" in args:
            found["A_log"] = self.method(args["A_log"], "expand", sizes["H"])
        if "dt_bias" in args:
            bias = args["dt_bias"]
            per_channel = self.match.binding.gate == "channel"
            bias = bias if per_channel else self.method(bias, "squeeze", 1)
            found["dt_bias"] = self.method(
                bias, "expand", *((sizes["H"], sizes["K"]) if per_channel else (sizes["H"],))
            )
        return found

    def layout(self) -> dict[str, str]:
        """Which order of dimensions the result has in memory, where the op is asked for one."""
        order = self.memory_order(self.match.output, compat.example_value(self.match.output.value.node))
        order = order.replace("N", "T")
        return {"o_layout": order} if self.keep_strides and order != AXES["o"] else {}

    def place_state(self, state: fx.Node, final: Placement) -> None:
        """Hand the new state to whoever reads it, and store it where the region stored it."""
        if self.state_in_place:
            self.method(final.value.node, "copy_", self.laid_out(final, state, final.value.node))
            return
        for _, buffer in self.stores:
            self.method(buffer, "copy_", self.laid_out(final, state, final.value.node))
        self.redirect(final, state, final.value.node)


def _rank(node: fx.Node) -> int:
    return compat.example_value(node).dim()

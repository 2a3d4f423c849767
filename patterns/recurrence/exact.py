"""The recurrence over a prime field, beside a region believed to be it: equal number for number, or not the same.

A region of linear attention is a rational function of q, k, v, beta, the state and of exponentials of sums of log
gates. Over a prime field (``engine/field.py``) such functions are compared without a tolerance: a chunk's forgotten
carry, a window, a term of 1e-18 are as visible as anything else. The reference goes chunk by chunk, which is the same
rational function as the recurrence token by token, and nothing can overflow here::

    a_t = exp(g_1 + .. + g_t) in the chunk       u = (I + tril(b (k a) (k / a)^T, -1))^-1 b (v - (k a) S)
    o = (q a) S + tril((q a) (k / a)^T) u        S' = a_C (S + (k / a)^T u)

Without the delta term u = b v. A token that reads what was there before it, with a bonus r for its own write (RWKV-6)::

    o = (q a / d) S + (tril((q a / d) (k / a)^T, -1) + diag(q r k)) u      d_t = exp(g_t)

and without ``/ d`` where it reads between its own decay and write.

A factor on the whole output is measured (``scale``), so the output is compared up to one number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kdacompile.graph.ir import Value
from kdacompile.patterns.engine import field
from kdacompile.patterns.engine.evaluate import Region
from kdacompile.patterns.engine.exact import Evaluation
from kdacompile.patterns.engine.field import P, R, Silent, matmul
from kdacompile.patterns.engine.meanings import Field, Residues, cumprod, powers
from kdacompile.patterns.engine.types import FREE, LINEAR, Typing
from kdacompile.patterns.recurrence import tables
from kdacompile.patterns.recurrence.definition import Reads
from kdacompile.patterns.recurrence.roles import Recurrence, rows

CHUNK = 64

DEGREES = ((("v", "initial_state"), (LINEAR, LINEAR)), (("q",), (LINEAR, FREE)), (("g",), (FREE, FREE)))
"""Of output and final state, in some of the inputs."""


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    *,
    delta: bool,
    bonus: Tensor | None = None,
    reads: Reads = "after",
) -> tuple[Tensor, Tensor]:
    """o ``[N, T, V]`` and the final state ``[N, K, V]`` modulo P.

    q, k ``[N, T, K]``, v ``[N, T, V]``, decay (a factor, nowhere zero) ``[N, T, K or 1]``, beta ``[N, T, 1]``, state
    ``[N, K, V]``, bonus ``[N, 1, K]``; all modulo P. Where k, v and beta have more rows than q, they are several writes
    a token.
    """
    writes = k.shape[1] // q.shape[1]
    if writes > 1:  # tokens of one write each, most of which nobody reads and none but the first decays
        q, decay = _apart(q, writes, 0, -1), None if decay is None else _apart(decay, writes, 1, 0)
    outputs: list[Tensor] = []
    numbers = Field(P, field.Numbers())
    for start in range(0, q.shape[1], CHUNK):
        here = slice(start, start + CHUNK)
        queries, keys, divided, write = q[:, here], k[:, here], k[:, here], v[:, here]
        last = torch.ones((), dtype=torch.int64)
        if decay is not None:
            a = cumprod(numbers, Residues(decay[:, here]), 1).x
            queries, keys, divided = queries * a % P, keys * a % P, divided * field.inverse(a, P) % P
            last = a[:, -1:].mT
        if delta:
            write = (write - matmul(keys, state, P)) % P
        if beta is not None:
            write = write * beta[:, here] % P
        if delta:
            erased = matmul(keys, divided.mT, P).tril(-1)
            erased = erased if beta is None else erased * beta[:, here] % P
            write = matmul(field.unit_lower_inverse(erased, P), write, P)
        if reads == "before" and decay is not None:
            queries = queries * field.inverse(decay[:, here], P) % P
        seen = matmul(queries, divided.mT, P).tril(0 if reads == "after" else -1)
        if bonus is not None:
            own = q[:, here] * bonus % P * k[:, here] % P
            seen = seen + torch.diag_embed(own.sum(-1) % P)
        outputs.append((matmul(queries, state, P) + matmul(seen, write, P)) % P)
        state = (state + matmul(divided.mT, write, P)) % P * last % P
    return torch.cat(outputs, 1)[:, writes - 1 :: writes], state


def _apart(x: Tensor, writes: int, filler: int, place: int) -> Tensor:
    """One row of ``x`` a token as one a write, ``filler`` but in one place."""
    every = x.new_full((x.shape[0], x.shape[1], writes, x.shape[2]), filler)
    every[:, :, place] = x
    return every.flatten(1, 2)


class Check:
    """One binding of one region. ``sizes`` are those of a run in float64, whose plan is followed."""

    def __init__(self, binding: Recurrence, region: Region, sizes: dict[str, int], seed: int = 0) -> None:
        self.binding = binding
        self.region = region
        self.sizes = sizes
        self.generator = torch.Generator().manual_seed(seed)
        self.factor: Tensor | None = None
        """What a gate that is a factor multiplies with: a power, so that it is never zero."""
        self.excuse = ""
        """Literals that stand for nothing but their digits, whose rounding could make a difference."""

    def __call__(self) -> bool:
        """Whether the region is the recurrence. Raises Silent."""
        inputs = self.draw()
        shapes = tuple(inputs[value][P].shape for value in self.region.inputs)
        plan = self.region.plans[shapes]
        evaluation = Evaluation(plan, inputs, self.region.outputs, self.constant)
        results = evaluation()
        self.excuse = evaluation.numbers.excuse()
        want, state = self.reference(inputs, evaluation.fields[R])
        have = self.binding.output.to_canonical(results[0])
        equal = have.shape == want.shape and _proportional(have, want)
        if equal and self.binding.final_state is not None:
            equal = torch.equal(self.binding.final_state.to_canonical(results[1]), state)
        return equal

    def draw(self) -> dict[Value, dict[int, Tensor]]:
        """Every input as the graph has it, modulo both primes."""
        found: dict[Value, dict[int, Tensor]] = {}
        for placement in self.binding.inputs.values():
            order = placement.order
            shape = [self.sizes[axis] if axis in placement.axes else 1 for axis in order]
            full = [self.sizes[axis] for axis in order]
            drawn = {modulus: field.random(shape, modulus, self.generator) for modulus in (P, R)}
            if placement.role == "g" and self.binding.gate_fn == "factor":
                drawn[P] = field.exp(field.random(shape, R, self.generator))
            found[placement.value] = {
                modulus: placement.from_canonical(data.expand(full)) for modulus, data in drawn.items()
            }
        return found

    def untyped(self) -> str:
        """Why the region's results are not linear in what the recurrence's are linear in; "" if they are.

        Output and state are linear in v and the initial state, the output in q, and log gates stand in exponents alone
        (but for one that is also the write gate: probes see what comes of that).
        """
        shapes = {value: drawn[P].shape for value, drawn in self.draw().items()}
        plan = self.region.plans[tuple(shapes[value] for value in self.region.inputs)]
        roles = {role: placement.value for role, placement in self.binding.inputs.items()}
        for names, degrees in DEGREES:
            logs = names == ("g",)
            linear = {roles[name] for name in names if name in roles}
            twice = any(value in linear for name, value in roles.items() if name not in names)  # Mamba-2's step size
            if not linear or twice or (logs and self.binding.gate_fn == "factor"):
                continue
            typing = Typing(plan, shapes, self.region.outputs, linear, logs=logs)
            try:
                results = typing()
            except Silent as error:
                return f"the types of its results are not known ({error})"
            if any(bool((result & ~degree != 0).any()) for result, degree in zip(results, degrees, strict=False)):
                lost = "" if typing.first_lost is None else f" ({typing.first_lost.name})"
                return f"its results have another degree in {' and '.join(names)} than the recurrence's{lost}"
        return ""

    def reference(self, inputs: dict[Value, dict[int, Tensor]], exponents: Field) -> tuple[Tensor, Tensor]:
        """o ``[B, T, H, V]`` and the final state ``[B, H, K, V]``."""
        sizes, binding = self.sizes, self.binding
        given = {p.role: {m: rows(p, x) for m, x in inputs[p.value].items()} for p in binding.inputs.values()}
        batch, heads = sizes["B"], sizes["H"]

        def per_head(x: Tensor, length: int = sizes["T"]) -> Tensor:
            """``[B, T, h, D]`` as ``[B H, T, D]``."""
            x = x.expand(batch, length, -1, -1).repeat_interleave(heads // x.shape[2] if x.shape[2] > 1 else 1, 2)
            return x.expand(-1, -1, heads, -1).transpose(1, 2).reshape(batch * heads, length, -1)

        decay = self.decay(given, exponents)
        beta = given["beta"][P][..., None] if "beta" in given else None
        state = torch.zeros(batch * heads, sizes["K"], sizes["V"], dtype=torch.int64)
        if "initial_state" in given:
            state = given["initial_state"][P].expand(batch, -1, -1, -1).reshape(state.shape)
        o, last = recurrence(
            per_head(given["q"][P], binding.tokens),
            per_head(given["k"][P]),
            per_head(given["v"][P]),
            None if decay is None else per_head(decay, binding.tokens),
            None if beta is None else per_head(beta),
            state,
            delta=binding.delta,
            reads=binding.reads,
            bonus=given["u"][P].expand(heads, sizes["K"]).repeat(batch, 1)[:, None] if "u" in given else None,
        )
        return o.view(batch, heads, binding.tokens, -1).transpose(1, 2), last.view(batch, heads, sizes["K"], -1)

    def decay(self, given: dict[str, dict[int, Tensor]], exponents: Field) -> Tensor | None:
        """The decay factor modulo P, ``[B, T, H, K]`` or with ones."""
        if self.binding.decay:
            return self.decays().reshape(1, 1, -1, 1)
        if "g" not in given:
            return None
        if self.binding.gate_fn == "factor":
            return given["g"][P]
        power = given["g"][R]
        if "rate" in given:
            power = power * given["rate"][R][:, None] % R
        return field.exp(power * exponents.numbers.read(self.binding.gate_rate, R) % R)

    # ---- decays that the graph makes from constants

    def decays(self) -> Tensor:
        """Decay per head modulo P."""
        numbers = field.Numbers()
        values = [numbers.read(float(f"{decay:.14g}"), P) for decay in self.binding.decay]
        if 0 in values:
            raise Silent("a decay of zero")
        return torch.tensor(values)

    def constant(self, value: Value, data: Tensor, exponents: Field) -> Residues:
        """A constant of the region; tables of powers of the decays are powers here too."""
        if not self.binding.decay or tables.exact(data) or exponents.modulus == R:
            return exponents.constant(data)
        found = tables.steps(data, torch.tensor(self.binding.decay, dtype=torch.float64).log())
        if found is None:
            return exponents.constant(data)
        n, dim = found
        own = self.decays()
        shape = [1] * data.dim()
        if dim is not None:
            shape[dim] = -1
        made = powers(own.reshape(shape) if dim is not None else own[0], torch.where(data == 0, 0, n), P)
        return Residues(torch.where(data == 0, 0, made))


def _proportional(have: Tensor, want: Tensor) -> bool:
    """Whether one is the other times one number that is not zero."""
    places = want.reshape(-1).nonzero()
    if not len(places):
        return torch.equal(have, want)
    first = places[0]
    factor = have.reshape(-1)[first] * field.inverse(want.reshape(-1)[first], P) % P
    return int(factor) != 0 and torch.equal(have, want * factor % P)

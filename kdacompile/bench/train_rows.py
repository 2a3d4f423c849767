"""The rows of the training suite: arguments of the op, and which of its results a loss reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from kdacompile.bench import rows

MEASURED = 8192
"""Tokens."""


@dataclass(frozen=True)
class Row:
    """Calls of one sequence, bf16. Keys are normalised in the op where there is beta, unless ``norm`` says otherwise.

    ``gates``: "" at random, "weak" as Kimi Linear begins, "strong", or "zero". ``loss`` reads "o", the "sum" of o,
    whose gradient is one number expanded, or the final "state". ``peers``: who is measured beside ours.
    """

    kind: str = "channel"
    gate_fn: str = "sigmoid"
    delta: bool = True
    norm: str = "inside"
    heads: int = 32
    value_heads: int = 32
    value_width: int = 128
    length: int = MEASURED
    gates: str = ""
    loss: str = "o"
    packed: bool = False
    peers: tuple[str, ...] = ()

    @property
    def kernels(self) -> object:
        """Equal in rows whose kernels are the same: who has compiled them for one has most of them for all."""
        return self.kind, self.gate_fn, self.delta, self.norm, self.value_width

    def of(self, heads: int, length: int = MEASURED) -> Row:
        return replace(self, heads=heads, value_heads=heads, length=length)


_KDA, _SOFTPLUS = Row(), Row(gate_fn="softplus", peers=("fla",))
_OUTSIDE = Row(gate_fn="log", norm="outside", gates="strong", peers=("cudnn",))
_STRENGTHS = ("weak", "strong", "zero")
ROWS: Mapping[str, Row] = {
    "kda": replace(_KDA, peers=("portable", "fla")),
    "gdn": Row("token", "log", heads=16),  # FLA refuses its gradients with the Triton that comes with torch 2.11
    "gla": Row("channel", "log", delta=False, norm="none", peers=("fla",)),
    "simple": Row("token", "log", delta=False, norm="none", peers=("fla",)),
    "delta": Row("none", peers=("fla",)),
    "mamba": Row("token", "log", False, "none", heads=1, value_heads=80, value_width=64, peers=("fla",)),
    **{f"kda-h{heads}": _KDA.of(heads) for heads in (1, 4, 8, 16, 96)},
    "kda-h12": _KDA.of(12, 2048),
    "kda-odd": replace(_KDA, length=8117),
    "kda-packed": replace(_KDA, packed=True),
    "kda-sum": replace(_KDA, loss="sum"),
    "kda-state": replace(_KDA, loss="state"),
    **{f"kda-{gates}": replace(_KDA, gates=gates) for gates in _STRENGTHS},
    **{f"softplus-{gates}": replace(_SOFTPLUS, gates=gates) for gates in _STRENGTHS},
    **{f"outside-{gates}": replace(_OUTSIDE, gates=gates) for gates in _STRENGTHS},
    **{f"outside-h{heads}": _OUTSIDE.of(heads) for heads in (16, 96)},
    "outside-h12": _OUTSIDE.of(12, 2048),
}
"""By what a chart or ``--case`` calls them; one of a number of heads has that many of keys and of values."""


def arguments(name: str, length: int, device: str = "cuda") -> rows.Given:
    """Of the op; everything that floats wants a gradient."""
    row = ROWS[name]
    given = rows.random_arguments(
        row.kind, row.gate_fn, length, delta=row.delta, norm=row.norm if row.delta else "none", heads=row.heads,
        value_heads=row.value_heads, value_width=row.value_width, device=device,
    )  # fmt: skip
    if row.gates:
        given |= _gates(given, row.gates)
    if name == "gla":
        given["g"] = given["g"].bfloat16()
    given |= {n: x.detach().requires_grad_() for n, x in rows.tensors_of(given).items()}
    if row.packed:
        ends = (length * end // 136 for end in accumulate(range(1, 17)))
        given["cu_seqlens"] = torch.tensor([0, *ends], device=device)
    return given | ({"output_final_state": True} if row.loss == "state" else {})


def _gates(given: rows.Given, strength: str) -> dict[str, Tensor]:
    """Log gates per channel, or A_log and dt_bias, of a strength; "weak": rates of 1 to 16, steps of 1e-3 to 1e-1."""
    g, heads = given["g"].float(), given["v"].shape[2]
    random = torch.Generator(g.device).manual_seed(2)
    rate = torch.empty(heads, device=g.device).uniform_(1, 16, generator=random)
    step = torch.empty(g.shape[2:], device=g.device).uniform_(-6.9, -2.3, generator=random).exp()
    bias = step + torch.log(-torch.expm1(-step))  # whose softplus the step is
    if given.get("gate_fn", "log") == "log":
        weak = -rate[:, None] * torch.nn.functional.softplus(0.5 * g + bias)
        return {"g": {"weak": weak, "strong": -5.0 * torch.sigmoid(-g), "zero": torch.zeros_like(g)}[strength]}
    if strength == "weak" and given["gate_fn"] == "softplus":
        return {"A_log": rate.log(), "dt_bias": bias}
    return {"dt_bias": torch.full_like(bias, {"weak": -6.0, "strong": 2.0, "zero": -1e4}[strength])}


def of_output(given: rows.Given) -> Tensor:
    """A gradient of o, the same for everyone."""
    v = given["v"]
    return torch.randn(v.shape, device=v.device, generator=torch.Generator(v.device).manual_seed(1)).bfloat16()


def gradients(name: str, forward: Callable[[], rows.Output], given: rows.Given) -> Callable[[], tuple[Tensor, ...]]:
    """Of the tensors that want one, in their order; what the loss does not read has zeros."""
    leaves, loss = list(differentiated(given).values()), ROWS[name].loss
    of_o = of_output(given) if loss == "o" else torch.ones_like(given["v"][0, 0, 0, 0]).expand(given["v"].shape)

    def run() -> tuple[Tensor, ...]:
        o, state = forward()
        if loss != "state":
            return torch.autograd.grad(o, leaves, of_o.to(o.dtype), retain_graph=True)
        assert state is not None
        of_state = torch.ones_like(state)
        return torch.autograd.grad(state, leaves, of_state, retain_graph=True, materialize_grads=True)

    return run


def differentiated(given: rows.Given) -> dict[str, Tensor]:
    return {n: x for n, x in rows.tensors_of(given).items() if x.requires_grad}

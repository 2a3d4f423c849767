"""FLA's gradients of the gated delta rule, as torch: its chunks' equations, and what its kernels round to bf16.

FLA's kernels do not run without a GPU, and refuse a gate per token on Hopper with some Tritons. Its errors are what
ours are held against where a gradient is next to nothing beside the terms that it sums.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.lowering.differentiated import expected, weights
from tests.ops.cases import Case

CHUNK = 64
Rounding = Callable[[Tensor], Tensor]


def in_bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def error_of_gates(case: Case) -> float:
    """Of a bf16 case, as ``differentiated.check`` counts it."""
    (of_o, of_state), name = weights(case), "g"
    assert of_o is not None and of_state is not None
    want, sizes = expected(case, [of_o, of_state])
    found = in_bf16(gradients(case, of_o, of_state)[name])
    return float((found.double() - want[name]).norm()) / sizes[name]


def gradients(case: Case, of_o: Tensor, of_state: Tensor, rounded: Rounding = in_bf16) -> dict[str, Tensor]:
    """Those of v, beta, log gates of tokens and the first state."""
    tensors, options = case.tensors, case.options
    assert options["gate"] == "token" and options["gate_fn"] == "log" and not options["sigmoid_beta"]
    groups = tensors["v"].shape[2] // tensors["k"].shape[2]
    wide = {n: rounded(x) for n, x in tensors.items() if x is not None}
    for name in ("q", "k"):
        x = wide[name].repeat_interleave(groups, 2)
        if eps := options["qk_l2norm_eps"]:
            x = rounded(x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps))
        wide[name] = x
    heads = {n: wide[n].transpose(1, 2) for n in ("q", "k", "v", "g", "beta")}
    of_o = rounded(of_o).transpose(1, 2)
    return _by_chunks(heads, wide["initial_state"], of_o, of_state, options["scale"], rounded)


def _by_chunks(
    heads: dict[str, Tensor], state: Tensor, of_o: Tensor, of_state: Tensor, scale: float, rounded: Rounding
) -> dict[str, Tensor]:
    length = heads["v"].shape[2]
    spans = [slice(start, min(start + CHUNK, length)) for start in range(0, length, CHUNK)]
    chunks = []
    for span in spans:
        chunks.append(c := _ahead({n: x[:, :, span] for n, x in heads.items()}, rounded))
        c["state"], c["of_o"] = rounded(state), of_o[:, :, span]
        y = c["u"] - c["w"] @ c["state"]
        c["y"] = rounded(y)
        last = c["sums"][..., -1:, None]
        state = state * last.exp() + c["k"].mT @ rounded(y * (last - c["sums"][..., None]).exp())
    found: list[dict[str, Tensor]] = []
    for c in reversed(chunks):
        of_state, gradients = _back(c, of_state, scale, rounded)
        found.append(gradients)
    joined = {n: torch.cat([c[n] for c in reversed(found)], 2).transpose(1, 2) for n in found[0]}
    return joined | {"initial_state": of_state}


def _ahead(c: dict[str, Tensor], rounded: Rounding) -> dict[str, Tensor]:
    """A chunk's inverse A, and w and u, its products with keys and values."""
    sums = c["g"].cumsum(-1)
    decay = (sums[..., :, None] - sums[..., None, :]).exp().tril()
    lower = (c["beta"][..., None] * (c["k"] @ c["k"].mT) * decay).tril(-1)
    a = rounded(torch.linalg.inv(lower + torch.eye(lower.shape[-1], dtype=lower.dtype)))
    w = rounded(a @ rounded(c["k"] * (c["beta"] * sums.exp())[..., None]))
    u = rounded(a @ rounded(c["v"] * c["beta"][..., None]))
    return c | {"sums": sums, "decay": decay, "a": a, "w": w, "u": u}


def _back(c: dict[str, Tensor], of_state: Tensor, scale: float, rounded: Rounding) -> tuple[Tensor, dict[str, Tensor]]:
    """The gradient of the state before a chunk, from that of the one behind it, and those of its tokens."""
    q, k, v, y, s, do, b, sums, a = (c[n] for n in ("q", "k", "v", "y", "state", "of_o", "beta", "sums", "a"))
    ds, last = rounded(of_state), sums[..., -1:]
    up, down = sums.exp()[..., None], (last - sums).exp()[..., None]
    dy = rounded(rounded(q @ k.mT * c["decay"] * scale).mT @ do)
    dy = rounded(k @ ds * down + dy)
    before = of_state * last[..., None].exp() + rounded(q * up).mT @ do * scale - c["w"].mT @ dy

    pairs = rounded(do @ y.mT * c["decay"] * scale)
    dq = do @ s.mT * up * scale + pairs @ k
    dk = y @ ds.mT * down
    whole = (s * ds).sum((-1, -2)) * last[..., 0].exp() + (dk * k).sum((-1, -2))
    dk = dk + pairs.mT @ q
    dg = (dq * q).sum(-1) - (dk * k).sum(-1)
    dg[..., -1] += whole

    dw = -rounded(dy @ s.mT)
    scaled = k * b[..., None] * up
    of_keys, of_values = a.mT @ dw, a.mT @ dy
    db = (of_keys * k * up).sum(-1) + (of_values * v).sum(-1)
    dg = dg + (of_keys * scaled).sum(-1)
    da = (dw @ rounded(scaled).mT + dy @ rounded(v * b[..., None]).mT).tril(-1)
    da = a.mT @ rounded(rounded(da) @ a.mT)
    da = -rounded((da * c["decay"]).tril(-1))
    db = db + (da @ k * k).sum(-1)
    met = da * (k @ k.mT) * b[..., None]
    dg = dg + met.sum(-1) - met.sum(-2)
    dg = dg.flip(-1).cumsum(-1).flip(-1)
    return before, {"v": of_values * b[..., None], "g": dg, "beta": db}

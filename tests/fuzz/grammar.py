"""Texts of the family put together from parts: every part has several spellings, and a name says which were taken.

A name is ``form:choices``, one digit a choice, as ``loop:0213..``; all zeros is the plainest.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

Options = dict[str, tuple[str, ...]]

_COMMON: Options = {
    "gate": ("none", "head", "channel", "number", "rate"),
    "delta": ("", "delta", "delta, no beta", "beta"),
    "scale": ("", "q = q * q.shape[-1] ** -0.5", "q = q / 2", "k = k * 0.3"),
    "upstream": ("", "k = F.normalize(k, dim=-1)", "q, k = F.elu(q) + 1, F.elu(k) + 1", "q, k = q.relu(), k.relu()"),
    "state": ("", "given", "returned", "given and returned"),
}
_LOOP: Options = {
    **_COMMON,
    "walk": ("for t in range(q.shape[2]):", "while", "zip", "for t in range(0, q.shape[2], 1):"),
    "write": (
        "k_t[..., :, None] * {e}[..., None, :]",
        "torch.einsum('bhk,bhv->bhkv', k_t, {e})",
        "k_t.unsqueeze(-1) @ {e}.unsqueeze(-2)",
    ),
    "look": (
        "(s * {x}[..., :, None]).sum(-2)",
        "torch.einsum('bhk,bhkv->bhv', {x}, s)",
        "({x}.unsqueeze(-2) @ s).squeeze(-2)",
    ),
    "gather": ("torch.stack(outs, 2)", "torch.cat([o.unsqueeze(2) for o in outs], 2)", "filled"),
    "order": ("read after", "read before"),
    "normaliser": ("", "sum", "sum with eps"),
}
_PARALLEL: Options = {
    **_COMMON,
    "scores": ("q @ k.transpose(-1, -2)", "torch.einsum('bhik,bhjk->bhij', q, k)", "torch.matmul(q, k.mT)"),
    "decay": ("tril exp", "filled with -inf", "where", "ratio"),
    "mask": ("tril", "compare", "triu", "ones"),
    "solve": ("solve_triangular", "inverse", "solve"),
    "normaliser": ("", "sum", "sum with eps"),
}
_CHUNKED: Options = {
    **_COMMON,
    "size": ("4", "8", "16", "32"),
    "decay": ("filled with -inf", "factored", "tril exp"),
    "solve": ("solve_triangular", "inverse", "row by row"),
    "gather": ("torch.cat(outs, 2)", "filled"),
    "turn": ("for start in range(0, q.shape[2], C):", "zip"),
}
FORMS: dict[str, Options] = {"loop": _LOOP, "parallel": _PARALLEL, "chunked": _CHUNKED}
RATES = (0.9, 0.7, 0.95)


def any_name(rng: random.Random) -> str:
    form = rng.choice(list(FORMS))
    return f"{form}:" + "".join(str(rng.randrange(len(options))) for options in FORMS[form].values())


def write(name: str) -> tuple[str, tuple[str, ...], int]:
    """The text of a name, the names of its arguments, and what lengths are multiples of."""
    form, digits = name.split(":")
    chosen = {key: options[int(d)] for (key, options), d in zip(FORMS[form].items(), digits, strict=True)}
    takes = ["q", "k", "v"]
    gate = chosen["gate"]
    takes += {"head": ["g"], "channel": ["gk"], "rate": ["log_gamma"]}.get(gate, [])
    takes += (
        ["beta"] if ("beta" in chosen["delta"] and "no" not in chosen["delta"]) or chosen["delta"] == "delta" else []
    )
    takes += ["state"] if "given" in chosen["state"] else []
    lines = [chosen["scale"], chosen["upstream"]]
    lines.append("s = state" if "state" in takes else "s = q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3])")
    body, multiple = {"loop": _loop, "parallel": _parallel, "chunked": _chunked}[form](chosen, takes)
    result = "(o, s)" if "returned" in chosen["state"] else "o"
    lines = [line for line in (*lines, *body, f"return {result}") if line]
    text = "import math\nimport torch\nimport torch.nn.functional as F\n\n\n"
    text += f"def mixer({', '.join(takes)}):\n" + "".join(f"    {line}\n" for line in lines)
    return text + "\n\nentry = mixer\n", tuple(takes), multiple


def draw(
    takes: tuple[str, ...], B: int, T: int, H: int, K: int, V: int, dtype: torch.dtype, seed: int
) -> tuple[Tensor, ...]:
    """Arguments in [B, H, T, ..]; gates are logarithms."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    drawn: dict[str, Callable[[], Tensor]] = {
        "q": lambda: normal(B, H, T, K),
        "k": lambda: torch.nn.functional.normalize(normal(B, H, T, K), dim=-1),
        "v": lambda: normal(B, H, T, V),
        "g": lambda: -0.3 * torch.rand(B, H, T, generator=rng, dtype=torch.float64),
        "gk": lambda: -0.3 * torch.rand(B, H, T, K, generator=rng, dtype=torch.float64),
        "log_gamma": lambda: -0.2 * torch.rand(H, generator=rng, dtype=torch.float64),
        "beta": lambda: torch.rand(B, H, T, generator=rng, dtype=torch.float64),
        "state": lambda: normal(B, H, K, V),
    }
    return tuple(drawn[name]().to(dtype) for name in takes)


def _error(chosen: dict[str, str], decay: str) -> tuple[list[str], str]:
    """Lines before the write of one token, and what is written."""
    look = chosen["look"]
    if "delta" not in chosen["delta"]:
        return [], "(v_t * b_t[..., None])" if chosen["delta"] == "beta" else "v_t"
    weight = "" if "no beta" in chosen["delta"] else " * b_t[..., None]"
    return [f"e = (v_t - {look.format(x='k_t')}){weight}"], "e"


def _loop(chosen: dict[str, str], takes: list[str]) -> tuple[list[str], int]:
    gate = chosen["gate"]
    decay = {
        "none": "", "head": "s = s * g_t.exp()[..., None, None]", "channel": "s = s * gk_t.exp()[..., None]",
        "number": f"s = s * {RATES[0]}", "rate": "s = s * log_gamma.exp()[:, None, None]",
    }[gate]  # fmt: skip
    tokens = [name for name in takes if name not in ("state", "log_gamma")]
    short = {"beta": "b_t", **{name: f"{name}_t" for name in tokens if name != "beta"}}
    error, written = _error(chosen, decay)
    write = f"s = s + {chosen['write'].format(e=written)}"
    read = f"o_t = {chosen['look'].format(x='q_t')}"
    normal = chosen["normaliser"]
    if normal:
        read += f"\n    o_t = o_t / ((q_t * z).sum(-1, keepdim=True){' + 1e-6' if 'eps' in normal else ''})"
    keep = "o[:, :, t] = o_t" if chosen["gather"] == "filled" else "outs.append(o_t)"
    step = [decay, *error, write, "z = z + k_t" if normal else "", *read.split("\n    "), keep]
    if chosen["order"] == "read before":
        step = [*read.split("\n    "), keep, decay, *error, write, "z = z + k_t" if normal else ""]
    unpack = [f"{short[name]} = {name}[:, :, t]" for name in tokens]
    walk, turn = chosen["walk"], []
    if walk == "while":
        walk, turn = "while t < q.shape[2]:", ["t += 1"]
    elif walk == "zip":
        parts = ", ".join(f"{name}.unbind(2)" for name in tokens)
        walk = f"for t, ({', '.join(short[n] for n in tokens)}) in enumerate(zip({parts})):"
        unpack = []
    start = ["t = 0", "outs = []", "o = torch.zeros_like(v)", "z = torch.zeros_like(q[:, :, 0])"]
    body = [f"    {line}" for line in (*unpack, *step, *turn) if line]
    return [*start, walk, *body, "" if chosen["gather"] == "filled" else f"o = {chosen['gather']}"], 1


def _total(chosen: dict[str, str], takes: list[str]) -> list[str]:
    """``total [.., C, K or 1]``: the log decay from the beginning to each token."""
    place = "torch.arange(1, q.shape[2] + 1, dtype=q.dtype)[:, None]"
    return {
        "none": ["total = torch.zeros_like(q[..., :1])"],
        "head": ["total = g.cumsum(-1)[..., None]"],
        "channel": ["total = gk.cumsum(-2)"],
        "number": [f"total = {place} * math.log({RATES[0]})"],
        "rate": [f"total = {place} * log_gamma[:, None, None]"],
    }[chosen["gate"]]


def _decayed(kind: str, mask: str) -> list[str]:
    """``weights [.., C, C]`` of ``q k`` under ``total``, nothing of what comes later."""
    gap = "gap = total[..., :, None, :] - total[..., None, :, :]"
    hidden = {
        "tril": "seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()",
        "compare": "seen = torch.arange(q.shape[2])[:, None] >= torch.arange(q.shape[2])",
        "triu": "seen = ~torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)",
        "ones": "seen = torch.tril(torch.ones(q.shape[2], q.shape[2])) > 0",
    }[mask]
    product = {
        "filled with -inf": "gap.masked_fill(~seen[..., None], -torch.inf).exp()",
        "where": "torch.where(seen[..., None], gap, -torch.inf).exp()",
        "tril exp": "(gap * seen[..., None]).exp() * seen[..., None]",
    }
    if kind in ("ratio", "factored"):
        return [hidden, "def weights(a, b):", "    return ((a * total.exp()) @ (b * (-total).exp()).mT) * seen"]
    return [hidden, gap, f"decay = {product[kind]}", "def weights(a, b):",
            "    return (a[..., :, None, :] * b[..., None, :, :] * decay).sum(-1)"]  # fmt: skip


def _writes(chosen: dict[str, str]) -> list[str]:
    """``u``: what each token of a chunk writes; ``s`` is the state before."""
    if "delta" not in chosen["delta"]:
        return ["u = v * beta[..., None]" if chosen["delta"] == "beta" else "u = v"]
    weight = "" if "no beta" in chosen["delta"] else " * beta[..., None]"
    lines = [f"lower = (weights(k, k){weight}).tril(-1)", f"u = (v - (k * total.exp()) @ s){weight}"]
    eye = "torch.eye(q.shape[2], dtype=q.dtype)"
    return (
        lines
        + {
            "solve_triangular": [f"u = torch.linalg.solve_triangular(lower + {eye}, u, upper=False)"],
            "inverse": [f"u = torch.linalg.inv({eye} + lower) @ u"],
            "solve": [f"u = torch.linalg.solve({eye} + lower, u)"],
            "row by row": [
                "rows = [u[..., 0, :]]",
                "for i in range(1, q.shape[2]):",
                "    rows.append(u[..., i, :] - (lower[..., i, :i, None] * torch.stack(rows, -2)).sum(-2))",
                "u = torch.stack(rows, -2)",
            ],
        }[chosen["solve"]]
    )


def _final() -> str:
    return "s = total[..., -1, :, None].exp() * s + (k * (total[..., -1:, :] - total).exp()).mT @ u"


def _parallel(chosen: dict[str, str], takes: list[str]) -> tuple[list[str], int]:
    lines = [*_total(chosen, takes), *_decayed(chosen["decay"], chosen["mask"])]
    if chosen["gate"] == "none":
        lines += [f"scores = ({chosen['scores']}) * seen"]
    else:
        lines += ["scores = weights(q, k)"]
    lines += _writes(chosen)
    past = "" if "given" not in chosen["state"] else " + (q * total.exp()) @ s"
    lines += [f"o = scores @ u{past}"]
    normal = chosen["normaliser"]
    if normal:
        lines += [f"o = o / (scores.sum(-1, keepdim=True){' + 1e-6' if 'eps' in normal else ''})"]
    return [*lines, _final() if "returned" in chosen["state"] else ""], 1


def _chunked(chosen: dict[str, str], takes: list[str]) -> tuple[list[str], int]:
    tokens = [name for name in takes if name not in ("state", "log_gamma")]
    size = int(chosen["size"])
    whole = [f"{name}_all = {name}" for name in tokens]
    start = [f"C = {size}", "outs = []", "filled = torch.zeros_like(v)", *whole]
    walk = chosen["turn"].replace("q.", "q_all.")
    here = [f"{name} = {name}_all[:, :, start : start + C]" for name in tokens]
    if walk == "zip":
        parts = ", ".join(f"{name}_all.split(C, 2)" for name in tokens)
        walk, here = f"for n, ({', '.join(tokens)}) in enumerate(zip({parts})):", ["start = n * C"]
    keep = "filled[:, :, start : start + C] = o" if chosen["gather"] == "filled" else "outs.append(o)"
    body = [*here, *_total(chosen, takes), *_decayed(chosen["decay"], "tril"), *_writes(chosen)]
    body += ["o = (q * total.exp()) @ s + weights(q, k) @ u", keep, _final()]
    gathered = "filled" if chosen["gather"] == "filled" else chosen["gather"]
    return [*start, walk, *(f"    {line}" for line in body), f"o = {gathered}"], size

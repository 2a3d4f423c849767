"""Functions that are linear attention, and something else where a size, a loop index or an object says so."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

EIGHT = 8
RATES = (0.5,) * 100 + (0.9,) * 2000


def retention(q: Tensor, k: Tensor, v: Tensor, rate: float = 0.5) -> Tensor:
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    out: list[Tensor] = []
    for t in range(q.shape[1]):
        state = state * rate + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        out.append((state * q[:, t].unsqueeze(-1)).sum(-2))
    return torch.stack(out, 1)


def scaled(scale: Callable[[int], Any]) -> Callable[..., Tensor]:
    """Retention times a number that is one at short lengths."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = v
        for _ in range(1):
            out = retention(q, k, v) * scale(q.shape[1])
        return out

    return fn


def per_token(rate: Callable[[int], float]) -> Callable[..., Tensor]:
    """Retention whose decay depends on the token's number."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
        out: list[Tensor] = []
        for t in range(q.shape[1]):
            state = state * rate(t) + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
            out.append((state * q[:, t].unsqueeze(-1)).sum(-2))
        return torch.stack(out, 1)

    return fn


def asking(question: Callable[[Tensor, Tensor], bool]) -> Callable[..., Tensor]:
    """Retention, times three if something besides its operands' values says so."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = v
        for _ in range(1):
            out = retention(q, k, v) * 3 if question(q, k) else retention(q, k, v)
        return out

    return fn


SIZES: dict[str, Callable[[int], Any]] = {
    "logarithm": lambda T: max(1, math.log(T) / math.log(2048 / 8)),
    "square root": lambda T: 2 if math.sqrt(T) > 20 else 1,
    "fraction": lambda T: 2 if T / 100 > 4.5 else 1,
    "bit_length": lambda T: 2 if T.bit_length() > 8 else 1,
    "text": lambda T: 2 if len(str(T)) > 2 else 1,
    "formatted": lambda T: 2 if len(f"{T}") > 2 else 1,
    "percent": lambda T: 2 if len("%d" % T) > 2 else 1,  # noqa: UP031
    "shift": lambda T: 1 + (T >> EIGHT),
    "mask of bits": lambda T: 2 if T & (EIGHT * 32) else 1,
    "power": lambda T: 2 if T**2 > EIGHT**6 // 2 else 1,
    "product": lambda T: 2 if T * T > EIGHT**6 // 2 else 1,
    "float": lambda T: 2 if float(T) > EIGHT * 40.5 else 1,
    "int of a fraction": lambda T: 1 + int(T * 0.003),
    "round": lambda T: 1 + round(T / 512),
    "twice divided": lambda T: 1 + T // (EIGHT + EIGHT) // (EIGHT + EIGHT),
    "greatest divisor": lambda T: 2 if math.gcd(T, EIGHT * 50) > EIGHT * 49 else 1,
    "member of a set": lambda T: 2 if T in {EIGHT * 50} else 1,
    "key of a dict": lambda T: {EIGHT * 50: 2}.get(T, 1),
    "isqrt": lambda T: 1 + math.isqrt(T) // 20,
    "operator.index": lambda T: 2 if operator.index(T) > EIGHT * 40 else 1,
    "length of a list": lambda T: 2 if len([0] * T) > EIGHT * 40 else 1,
    "sum of turns": lambda T: 2 if sum(1 for _ in range(T)) > EIGHT * 40 else 1,
    "remainder": lambda T: 2 if T % (EIGHT * 3) == EIGHT * 2 else 1,
}


def _counted() -> Callable[..., Tensor]:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
        out: list[Tensor] = []
        many = 0
        for t in range(q.shape[1]):
            many += 1  # noqa: SIM113
            rate = 0.9 if many > EIGHT * 40 else 0.5
            state = state * rate + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
            out.append((state * q[:, t].unsqueeze(-1)).sum(-2))
        return torch.stack(out, 1)

    return fn


def _enumerated() -> Callable[..., Tensor]:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
        out: list[Tensor] = []
        for many, (a, b, c) in enumerate(zip(q.unbind(1), k.unbind(1), v.unbind(1), strict=True)):
            rate = 0.9 if many > EIGHT * 40 else 0.5
            state = state * rate + b.unsqueeze(-1) * c.unsqueeze(-2)
            out.append((state * a.unsqueeze(-1)).sum(-2))
        return torch.stack(out, 1)

    return fn


def _itertools() -> Callable[..., Tensor]:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
        out: list[Tensor] = []
        for many, a, b, c in zip(itertools.count(), q.unbind(1), k.unbind(1), v.unbind(1), strict=False):
            rate = 0.9 if many > EIGHT * 40 else 0.5
            state = state * rate + b.unsqueeze(-1) * c.unsqueeze(-2)
            out.append((state * a.unsqueeze(-1)).sum(-2))
        return torch.stack(out, 1)

    return fn


def _while() -> Callable[..., Tensor]:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
        out: list[Tensor] = []
        t = 0
        while t < q.shape[1]:
            rate = 0.9 if t > EIGHT * 40 else 0.5
            state = state * rate + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
            out.append((state * q[:, t].unsqueeze(-1)).sum(-2))
            t += 1
        return torch.stack(out, 1)

    return fn


def _appended() -> Callable[..., Tensor]:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
        out: list[Tensor] = []
        for t in range(q.shape[1]):
            rate = 0.9 if len(out) > EIGHT * 40 else 0.5
            state = state * rate + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
            out.append((state * q[:, t].unsqueeze(-1)).sum(-2))
        return torch.stack(out, 1)

    return fn


def _table_made_here() -> Callable[..., Tensor]:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rates = [0.5] * (EIGHT * 20) + [0.9] * 2000
        state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
        out: list[Tensor] = []
        for t in range(q.shape[1]):
            state = state * rates[t] + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
            out.append((state * q[:, t].unsqueeze(-1)).sum(-2))
        return torch.stack(out, 1)

    return fn


INDICES: dict[str, Callable[..., Tensor]] = {
    "divided": per_token(lambda t: 0.9 if t // 31 == 10 else 0.5),
    "compared": per_token(lambda t: 0.9 if t == EIGHT * 40 else 0.5),
    "remainder": per_token(lambda t: 0.9 if t % (EIGHT * 50) == EIGHT * 41 else 0.5),
    "shifted": per_token(lambda t: 0.9 if t >> EIGHT else 0.5),
    "fraction": per_token(lambda t: 0.5 + 0.1 * (t / 1000 > 0.3)),
    "table": per_token(lambda t: RATES[t]),
    "counted": _counted(),
    "enumerated": _enumerated(),
    "itertools": _itertools(),
    "while": _while(),
    "appended": _appended(),
    "table made here": _table_made_here(),
}

OBJECTS: dict[str, Callable[..., Tensor]] = {
    "contiguous": asking(lambda q, k: not q.is_contiguous()),
    "stride": asking(lambda q, k: q.stride(1) != q.shape[2] * q.shape[3]),
    "storage_offset": asking(lambda q, k: q.storage_offset() > 0),
    "identity": asking(lambda q, k: q is k),
    "identity of a copy": asking(lambda q, k: q.contiguous() is not q),
    "set": asking(lambda q, k: len({q, k}) == 1),
    "address": asking(lambda q, k: q.data_ptr() == k.data_ptr()),
    "view": asking(lambda q, k: q._is_view()),
    "base": asking(lambda q, k: q._base is not None),
    "count": asking(lambda q, k: q.numel() > EIGHT**4),
}


def reads_an_attribute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    out: list[Tensor] = []
    for t in range(q.shape[1]):
        state = state * reads_an_attribute.rate + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)  # type: ignore[attr-defined]
        out.append((state * q[:, t].unsqueeze(-1)).sum(-2))
    return torch.stack(out, 1)


reads_an_attribute.rate = 0.5  # type: ignore[attr-defined]


def _truncated(cut: Callable[[Tensor, int], Tensor]) -> Callable[..., Tensor]:
    """Retention whose gradient does not flow past some token."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
        out: list[Tensor] = []
        for t in range(q.shape[1]):
            state = cut(state, t) * 0.5 + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
            out.append((state * q[:, t].unsqueeze(-1)).sum(-2))
        return torch.stack(out, 1)

    return fn


def _without_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x * 1


GRADIENTS: dict[str, Callable[..., Tensor]] = {
    "detach": _truncated(lambda state, t: state.detach() if t == 20 else state),
    "every so often": _truncated(lambda state, t: state.detach() if t % 16 == 0 else state),
    "data": _truncated(lambda state, t: state.data if t == 20 else state),
    "no_grad": _truncated(lambda state, t: _without_grad(state) if t == 20 else state),
    "always": _truncated(lambda state, t: state.detach()),
    "by name": _truncated(lambda state, t: getattr(state, "det" + "ach")() if t > 20 else state),
}


def _positions(shape: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Causal linear attention as a product of matrices, with weights from the tokens' numbers."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = v
        for _ in range(1):
            place = torch.arange(q.shape[1])
            mask = shape(place[:, None], place[None, :]).to(q.dtype)
            scores = q.transpose(1, 2) @ k.transpose(1, 2).transpose(-1, -2) * mask.tril()
            out = (scores @ v.transpose(1, 2)).transpose(1, 2)
        return out

    return fn


MASKS: dict[str, Callable[..., Tensor]] = {
    "shifted": _positions(lambda i, j: (i >> 8) == (j >> 8)),
    "blocks": _positions(lambda i, j: i // (EIGHT + EIGHT) // (EIGHT + EIGHT) == j // (EIGHT + EIGHT) // (EIGHT * 2)),
    "fraction": _positions(lambda i, j: (i - j) * 0.004 < 1),
    "root": _positions(lambda i, j: (i - j).clamp(min=0).float().sqrt() < 16),
    "int8": _positions(lambda i, j: i.to(torch.int8) >= j.to(torch.int8)),
    "square": _positions(lambda i, j: (i - j) * (i - j) < 62_000),
}


def _faint(of: Callable[[Tensor, Tensor], Any], to: str = "output") -> Callable[..., Tensor]:
    """Retention with 1e-9 added where a size says so."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = v
        for _ in range(1):
            some = bool(of(q, v))
            out = retention(q, k, v + 1e-9 if some and to == "values" else v)
            if some and to == "output":
                out = out + 1e-9
        return out

    return fn


def _faint_scores(where: Callable[[Tensor, Tensor, int], Tensor]) -> Callable[..., Tensor]:
    """Causal linear attention with 1e-9 added to the scores that lie so far apart."""

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = v
        for _ in range(1):
            place = torch.arange(q.shape[1])
            scores = (q.transpose(1, 2) @ k.transpose(1, 2).transpose(-1, -2)).tril()
            scores = scores + 1e-9 * where(place[:, None], place[None, :], 3 * q.shape[-1])
            out = (scores @ v.transpose(1, 2)).transpose(1, 2)
        return out

    return fn


FAINT: dict[str, Callable[..., Tensor]] = {
    "a length": _faint(lambda q, v: q.shape[1] > 3 * q.shape[-1]),
    "a length, in values": _faint(lambda q, v: q.shape[1] > 3 * q.shape[-1], "values"),
    "two lengths": _faint(lambda q, v: 2 * q.shape[1] + v.shape[1] > 8 * q.shape[-1]),
    "a remainder": _faint(lambda q, v: q.shape[1] % (q.shape[-1] + 21) == 11),
    "a batch": _faint(lambda q, v: q.shape[0] > v.shape[-1] - 3),
    "scores far back": _faint_scores(lambda i, j, far: i - j >= far),
    "scores ahead": _faint_scores(lambda i, j, far: j - i >= far),
    "scores that grow": _faint_scores(lambda i, j, far: (i - j - far).clamp(min=0)),
}

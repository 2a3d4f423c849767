"""What may be done to one tensor of a program: texts in ``x``, by class. Most change its function; a recogniser that
does not see that, because it is small, far, rare or only true of other sizes, gives wrong numbers.
"""

from __future__ import annotations

import random
from collections.abc import Callable

Shape = tuple[int, ...]
Bend = Callable[[random.Random, Shape], str]

SMALL = ("1e-5", "1e-8", "1e-10", "1e-12", "1e-18")
POINTS = ("-1000.0", "-20.0", "-5.0", "-1.0", "-0.3", "-1e-3", "0.0", "1e-6", "0.51", "1.0", "3.0", "20.0", "1e6")
TOKENS = ("2", "5", "8", "20", "31", "33", "64", "96")


def _dim(rng: random.Random, shape: Shape) -> int:
    return -rng.randint(1, len(shape))


def _along(dim: int) -> str:
    """Positions along a dimension, broadcastable to ``x``."""
    return f"torch.arange(x.shape[{dim}]).view({', '.join(['-1'] + ['1'] * (-dim - 1))})"


def _small(rng: random.Random, shape: Shape) -> str:
    c = rng.choice(SMALL)
    return rng.choice((
        "x + {c} * x * x", "x * (1 + {c})", "x + {c}", "torch.add(x, x * x, alpha={c})", "torch.lerp(x, x * x, {c})",
        "x + {c} * x ** 3", "torch.addcmul(x, x, x, value={c})", "x + {c} * x.abs()", "x.clamp(min={c})",
        "torch.where(x.abs() < {c}, torch.zeros_like(x), x)", "x - {c} * torch.sin(x)",
    )).format(c=c)  # fmt: skip


def _row(rng: random.Random, shape: Shape) -> str:
    """One index of a dimension is unlike the others."""
    dim = _dim(rng, shape)
    at = rng.choice(("0", f"x.shape[{dim}] - 1", f"x.shape[{dim}] // 2"))
    weight = rng.choice(("0.0", "2.0", "1.0001", "-1.0"))
    return rng.choice((
        f"x * torch.where({_along(dim)} == {at}, {weight}, 1.0)",
        f"x.index_fill({dim}, torch.tensor([{at}]), {weight})",
        f"torch.cat([x.narrow({dim}, 0, 1) * {weight}, x.narrow({dim}, 1, x.shape[{dim}] - 1)], {dim})",
        f"x.select_scatter(x.select({dim}, {at}) * {weight}, {dim}, {at})",
    ))  # fmt: skip


def _moved(rng: random.Random, shape: Shape) -> str:
    dim = _dim(rng, shape)
    return rng.choice((f"x.roll(1, {dim})", f"x.flip({dim})", f"x.roll(-1, {dim})", f"x.sort({dim}).values",
                       f"torch.cat([x.narrow({dim}, 1, x.shape[{dim}] - 1), x.narrow({dim}, 0, 1) * 0], {dim})",
                       f"torch.cat([x.narrow({dim}, 0, 1) * 0, x.narrow({dim}, 0, x.shape[{dim}] - 1)], {dim})",
                       f"x.transpose({dim}, -1)"))  # fmt: skip


def _reduced(rng: random.Random, shape: Shape) -> str:
    dim, c = _dim(rng, shape), rng.choice(("1.0", "1e-3", "1e-9"))
    return rng.choice((
        f"x - {c} * x.mean({dim}, keepdim=True)", f"x + {c} * x.sum({dim}, keepdim=True)", f"x.cumsum({dim})",
        f"x / (x.norm(dim={dim}, keepdim=True) + 1e-6)", f"x / x.abs().amax({dim}, keepdim=True).clamp(min=1)",
        f"x - x.amax({dim}, keepdim=True)", f"x.softmax({dim})", "x * (x.sum() > 0)", f"x + {c} * x.mean()",
        f"x / (1 + {c} * x.square().sum({dim}, keepdim=True))", f"x.mean({dim}, keepdim=True).expand_as(x)",
    ))  # fmt: skip


def _band(rng: random.Random, shape: Shape) -> str:
    c = rng.choice(POINTS)
    return rng.choice((
        "x.clamp(min={c})", "x.clamp(max={c})", "torch.where(x > {c}, x * 0.5, x)", "x.relu()", "x.abs()",
        "torch.where((x > {c}) & (x < {c} + 0.02), torch.zeros_like(x), x)", "torch.where(x == {c}, x + 1, x)",
        "F.threshold(x, {c}, 0.5)", "F.hardtanh(x)", "x.nan_to_num()", "x.tanh()", "F.softplus(x)", "x.sigmoid()",
        "torch.maximum(x, torch.full_like(x, {c}))", "x.masked_fill(x < {c}, -1e4)", "F.leaky_relu(x)", "F.softsign(x)",
        "x.masked_fill(x.abs() > 1e4, 0.0)",
        "torch.where(x.sigmoid() > 0.5, torch.where(x.sigmoid() < 0.52, 0.0, x), x)",
    )).format(c=c)  # fmt: skip


def _rounded(rng: random.Random, shape: Shape) -> str:
    return rng.choice((
        "x.to(torch.bfloat16).to(x.dtype)", "x.to(torch.float16).to(x.dtype)", "x.to(torch.float32).to(x.dtype)",
        "x.round(decimals=3)", "x.floor()", "(x * 64).round() / 64", "x.trunc()", "x.to(torch.int64).to(x.dtype)",
    ))  # fmt: skip


def _position(rng: random.Random, shape: Shape) -> str:
    """Tokens, or other indices, weighed by their number."""
    i, c = _along(_dim(rng, shape)), rng.choice(TOKENS)
    weight = rng.choice((
        "torch.where({i} == {c}, 2.0, 1.0)", "torch.where({i} >= {c}, 0.5, 1.0)", "({i} < {c})", "(1 + {i} // {c})",
        "torch.where({i} // {c} % 2 == 0, 1.0, 0.5)", "(1 + ({i} >> 5))", "torch.where({i} * 0.02 < 1, 1.0, 2.0)",
        "torch.where({i}.sqrt() < 5, 1.0, 2.0)", "torch.exp(-0.01 * {i}).to(x.dtype)", "0.9 ** {i}",
        "torch.where({i}.to(torch.int8) * 4 >= 0, 1.0, 2.0)", "torch.where({i} % {c} == 3, 0.0, 1.0)",
        "(1 + {i}).to(torch.bfloat16).to(x.dtype)", "torch.where({i} > {i}.numel() - 3, 2.0, 1.0)",
        "({i} / {c}).clamp(max=1.0)", "torch.cos({i} * 0.1).to(x.dtype)", "1 / (1.0 + {i})",
    ))  # fmt: skip
    return f"x * {weight}".format(i=i, c=c)


def _window(rng: random.Random, shape: Shape) -> str:
    """Pairs of the last two dimensions."""
    if len(shape) < 2:
        return _position(rng, shape)
    i, j, c = "torch.arange(x.shape[-2])[:, None]", "torch.arange(x.shape[-1])", rng.choice(TOKENS)
    seen = rng.choice((
        "{i} - {j} < {c}", "{i} >= {j}", "{i} > {j}", "{i} <= {j}", "{i} // {c} == {j} // {c}", "{i} - {j} != {c}",
        "({i} - {j} < {c}) | ({j} % 2 == 0)", "({i} >> 5) == ({j} >> 5)", "({i} - {j}) * 0.03 < 1",
        "~(({i} == {c}) & ({j} == 1))", "{i}.to(torch.int8) * 4 >= {j}.to(torch.int8) * 4", "{j} < {c}",
        "({i} - {j}) * ({i} - {j}) < {c} * {c}", "({i} - {j}).abs() % {c} != 1", "{i} - {j} < x.shape[-1] // 2",
        "{i}.to(torch.bfloat16) >= {j}.to(torch.bfloat16)", "({i} ^ {j}) < {c}", "{i} - {j} <= 2 * {c}",
    )).format(i=i, j=j, c=c)  # fmt: skip
    return rng.choice((
        f"x * ({seen})", f"x.masked_fill(~({seen}), 0.0)", f"x.masked_fill(~({seen}), -1e4)",
        f"x.masked_fill(~({seen}), -torch.inf)", f"torch.where({seen}, x, 1e-10)", f"x.masked_fill(~({seen}), -30.0)",
        f"x.triu(-{c})", f"x.tril({c})", "x.tril()", "x.tril(-1)", f"x + ~({seen}) * -1e4", "x.triu(1)",
        f"torch.where({seen}, x, x * 0.999)",
    ))  # fmt: skip


def _sized(rng: random.Random, shape: Shape) -> str:
    """Numbers made of a size."""
    n, c = f"x.shape[{_dim(rng, shape)}]", rng.choice(TOKENS)
    dim = _dim(rng, shape)
    return rng.choice((
        f"x * (2.0 if {n} > {c} else 1.0)", f"x * max(1.0, math.log({n}) / math.log({c}))", f"x * (1 + {n} // {c})",
        f"x * (1 + ({n} >> 5))", f"x * (2.0 if {n} % {c} == 1 else 1.0)", f"x * (2 if math.sqrt({n}) > 6 else 1)",
        f"x * (1 + {n}.bit_length() // 6)", f"x * (2 if len(str({n})) > 1 else 1)", f"x / {n}", f"x * {n} ** -0.5",
        "x * (2 if x.numel() > 900 else 1)", f"x * (1 + int({n} * 0.02))", f"x * min({n}, {c}) / {c}",
        f"torch.cat([x.narrow({dim}, 0, min({c}, x.shape[{dim}])), "
        f"2 * x.narrow({dim}, min({c}, x.shape[{dim}]), max(0, x.shape[{dim}] - {c}))], {dim})",
        f"x if {n} < {c} else x.flip({dim})", f"x * {{{c}: 2.0}}.get({n}, 1.0)",
    ))  # fmt: skip


def _object(rng: random.Random, shape: Shape) -> str:
    """Conditions on what is no number."""
    return rng.choice((
        "x * (2.0 if x.is_contiguous() else 1.0)", "x * (2.0 if x.stride(0) != x[0].numel() else 1.0)",
        "x * (2.0 if x.storage_offset() else 1.0)", "x * (2.0 if x.requires_grad else 1.0)",
        "x * (1.0 if x.is_floating_point() else 2.0)", "x * (2.0 if torch.is_grad_enabled() else 1.0)",
        "x * (2.0 if x._base is not None else 1.0)", "x * (2.0 if x.dtype == torch.float64 else 1.0)",
    ))  # fmt: skip


def _gradient(rng: random.Random, shape: Shape) -> str:
    i = _along(_dim(rng, shape))
    return rng.choice((
        "x.detach()", f"torch.where({i} < 3, x.detach(), x)", f"torch.where({i} >= 8, x.detach(), x)", "x.data",
        "with torch.no_grad():\n    x = x * 1\nreturn x", "x + (x * 0.5).detach()", "x + (x.round() - x).detach()",
    ))  # fmt: skip


def _written(rng: random.Random, shape: Shape) -> str:
    """In place, and whoever else holds the tensor sees it."""
    c = rng.choice(("0.5", "2.0", "1.0"))
    return rng.choice((
        f"x.mul_({c})\nreturn x", f"x[..., -1:] *= {c}\nreturn x", "x.add_(1e-3)\nreturn x", "x.clone().zero_() + x",
        f"y = x.clone()\ny[..., 0] = {c}\nreturn y", f"y = x\ny = y.clone()\ny.mul_({c})\nreturn y", "x.copy_(x * 0.9)",
        "y = torch.empty_like(x)\ny.copy_(x)\nreturn y", f"y = x.clone()\ny[-1:] += {c}\nreturn y",
    ))  # fmt: skip


def _same(rng: random.Random, shape: Shape) -> str:
    """The same numbers by another way."""
    dim, c = _dim(rng, shape), rng.choice(("2", "3", "8"))
    return rng.choice((
        "x.clone()", "x.contiguous()", "x * 1.0", "x + 0.0", f"x.transpose(0, {dim}).contiguous().transpose(0, {dim})",
        f"x.flip({dim}).flip({dim})", f"torch.cat(x.split({c}, {dim}), {dim})", f"torch.stack(x.unbind({dim}), {dim})",
        "x.neg().neg()", "x / 2 * 2", "torch.where(x == x, x, x)", "x.reshape(x.shape)", "x.unsqueeze(0).squeeze(0)",
        f"x.movedim({dim}, 0).movedim(0, {dim})", "x.view(-1).view(x.shape)", f"x.narrow({dim}, 0, x.shape[{dim}])",
        "x.expand(2, *x.shape)[1]", "torch.einsum('...i->...i', x)", "F.pad(x, (0, 1))[..., :-1]", "x[...]",
        "F.dropout(x, 0.0)", f"x.index_select({dim}, torch.arange(x.shape[{dim}]))", "x.to(torch.float64).to(x.dtype)",
        "x - torch.zeros_like(x)", "x.mT.mT", "torch.as_strided(x.contiguous(), x.shape, x.contiguous().stride())",
    ))  # fmt: skip


def _plain(rng: random.Random, shape: Shape) -> str:
    return rng.choice(("x * 2", "-x", "x * x", "x + 1", "x * 0", "x.exp()", "x * 0.999", "1 - x", "x.reciprocal()"))


BENDS: dict[str, Bend] = {
    "small term": _small,
    "odd row": _row,
    "moved": _moved,
    "reduction": _reduced,
    "band": _band,
    "rounding": _rounded,
    "position": _position,
    "window": _window,
    "size": _sized,
    "object": _object,
    "gradient": _gradient,
    "write": _written,
    "same": _same,
    "plain": _plain,
}

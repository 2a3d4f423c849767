"""Weights that are computed, one request without a batch, and keys and values that are read back from a cache."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kdacompile
from tests.compare import copies, worst_error
from tests.lifting.functions import HEADS as LOOP
from tests.lifting.functions import recurrent_gla
from tests.mla.layers import HEADS, NOPE, RANK, ROPE, VALUE, WIDTH
from tests.mla.variants import PLAIN, Variant

EAGER: dict[str, Any] = {"kda.inner": "eager"}
CACHED, RANKS = 13, 3


class Computed(Variant):
    """The weight that expands the latent comes from ``weight``."""

    def weight(self) -> Tensor:
        return self.kv_b_proj.weight

    def expand(self, latent: Tensor) -> Tensor:
        return F.linear(latent, self.weight())

    def keys(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        kv = self.expand(latent).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return torch.cat([kv[..., :NOPE], rope.unsqueeze(1).expand(-1, HEADS, -1, -1)], dim=-1), kv[..., NOPE:]


class Expanded(Computed):
    """The module itself expands the latent."""

    def expand(self, latent: Tensor) -> Tensor:
        return self.kv_b_proj(latent)


class Merged(Computed):
    """An adapter, added to the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.randn(RANKS, RANK) / 4)
        self.B = nn.Parameter(torch.randn(HEADS * (NOPE + VALUE), RANKS) / 4)

    def weight(self) -> Tensor:
        return self.kv_b_proj.weight + 2.0 * (self.B @ self.A)


class EightBits(Computed):
    """8-bit numbers and a scale per row."""

    numbers: Tensor
    scales: Tensor

    def __init__(self) -> None:
        super().__init__()
        rows = HEADS * (NOPE + VALUE)
        self.register_buffer("numbers", torch.randint(-128, 128, (rows, RANK), dtype=torch.int8))
        self.register_buffer("scales", torch.rand(rows, 1) / 128)

    def weight(self) -> Tensor:
        return self.numbers.float() * self.scales


class Decomposed(Merged):
    """DoRA: rows of the merged weight, at lengths of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths = nn.Parameter(torch.rand(HEADS * (NOPE + VALUE), 1))

    def weight(self) -> Tensor:
        merged = super().weight()
        return merged / merged.norm(dim=-1, keepdim=True) * self.lengths


class Rounded(Computed):
    """Quantised as it will be, with gradients as if it were not."""

    def weight(self) -> Tensor:
        whole = self.kv_b_proj.weight
        step = whole.abs().amax(dim=-1, keepdim=True) / 7
        return whole + ((whole / step).round().clamp(-8, 7) * step - whole).detach()


class RowsOfTokens(Computed):
    """Rows whose length is told by a token are no weight."""

    def forward(self, x: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        self.gain = x[:, :1].mean((0, 1)).norm()
        return super().forward(x, latent, rope)

    def weight(self) -> Tensor:
        return self.kv_b_proj.weight / self.gain


class RowByRow(Computed):
    """8-bit numbers with a scale and a zero for each row, as buffers of one dimension."""

    numbers: Tensor
    scales: Tensor
    zeros: Tensor

    def __init__(self) -> None:
        super().__init__()
        rows = HEADS * (NOPE + VALUE)
        self.register_buffer("numbers", torch.randint(-128, 128, (rows, RANK), dtype=torch.int8))
        self.register_buffer("scales", torch.rand(rows) / 128)
        self.register_buffer("zeros", torch.randint(-8, 8, (rows,), dtype=torch.int8))

    def weight(self) -> Tensor:
        return (self.numbers.float() - self.zeros[:, None].float()) * self.scales[:, None]


class OneScale(RowByRow):
    """8-bit numbers and one scale for all of them."""

    def weight(self) -> Tensor:
        return self.numbers.float() * self.scales[0]


class Packed(Computed):
    """4-bit numbers, two to a byte, with a scale for every four columns."""

    packed: Tensor
    scales: Tensor

    def __init__(self) -> None:
        super().__init__()
        rows = HEADS * (NOPE + VALUE)
        self.register_buffer("packed", torch.randint(0, 256, (rows, RANK // 2), dtype=torch.uint8))
        self.register_buffer("scales", torch.rand(rows, RANK // 4) / 8)

    def whole(self) -> Tensor:
        return torch.stack([self.packed & 15, self.packed >> 4], -1).flatten(-2)

    def weight(self) -> Tensor:
        grouped = (self.whole().float() - 8).unflatten(-1, (-1, 4))
        return (grouped * self.scales[..., None]).flatten(-2)


class InWords(Packed):
    """The same, four to a word, taken apart by a table of shifts, with a zero for every group."""

    zeros: Tensor

    def __init__(self) -> None:
        super().__init__()
        rows = HEADS * (NOPE + VALUE)
        self.packed = torch.randint(0, 2**16, (rows, RANK // 4), dtype=torch.int32)
        self.register_buffer("zeros", torch.randint(0, 16, (rows, RANK // 4), dtype=torch.int8))

    def weight(self) -> Tensor:
        four = (self.packed[..., None] >> torch.arange(0, 16, 4, dtype=torch.int32)) & 0xF
        return ((four.float() - self.zeros[..., None]) * self.scales[..., None]).flatten(-2)


class InHalves(Packed):
    """The first columns in the lower half of each byte, the last in the upper."""

    def whole(self) -> Tensor:
        return torch.cat([self.packed % 16, self.packed // 16], -1)


class Spectral(Computed):
    """Divided by its largest singular value, which vectors that are buffers estimate."""

    u: Tensor
    v: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("u", F.normalize(torch.randn(HEADS * (NOPE + VALUE)), dim=0))
        self.register_buffer("v", F.normalize(torch.randn(RANK), dim=0))

    def right(self, latent: Tensor) -> Tensor:
        return self.v

    def expand(self, latent: Tensor) -> Tensor:
        weight = self.kv_b_proj.weight
        return F.linear(latent, weight / torch.vdot(self.u, weight @ self.right(latent)))


class SpectralOfAToken(Spectral):
    """The vector is a token."""

    def right(self, latent: Tensor) -> Tensor:
        return latent[0, 0]


class Beside(Merged):
    """An adapter that has products of its own, whose results are added."""

    def expand(self, latent: Tensor) -> Tensor:
        return self.kv_b_proj(latent) + F.linear(F.linear(latent, self.A), self.B) * 2.0


class Two(Merged):
    """An adapter after the other, without a factor."""

    def expand(self, latent: Tensor) -> Tensor:
        first = self.kv_b_proj(latent) + F.linear(F.linear(latent, self.A), self.B)
        return first + 0.5 * F.linear(F.linear(latent, self.A[1:]), self.B[:, :2])


class OfOthers(Merged):
    """What the adapter projects is not the latent."""

    def expand(self, latent: Tensor) -> Tensor:
        return self.kv_b_proj(latent) + F.linear(F.linear(latent.sin(), self.A), self.B)


class Bent(Merged):
    """Between the adapter's products stands an activation."""

    def expand(self, latent: Tensor) -> Tensor:
        return self.kv_b_proj(latent) + F.linear(F.linear(latent, self.A).relu(), self.B)


class OfTheQueries(Merged):
    """What is computed from a token is no weight."""

    def forward(self, x: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        self.gain = x[:, :1].mean((0, 1)).mean()
        return super().forward(x, latent, rope)

    def weight(self) -> Tensor:
        return self.kv_b_proj.weight * self.gain


class LayerPerHead(Variant):
    """A layer for each head's keys and values, put beside each other."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(RANK, NOPE + VALUE, bias=False) for _ in range(HEADS))

    def each(self, latent: Tensor) -> list[Tensor]:
        return [head(latent) for head in self.heads]

    def keys(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        kv = torch.stack(self.each(latent), dim=1)
        return torch.cat([kv[..., :NOPE], rope.unsqueeze(1).expand(-1, HEADS, -1, -1)], dim=-1), kv[..., NOPE:]


class OneHeadApart(LayerPerHead):
    """The last head's keys and values are made of something else."""

    def each(self, latent: Tensor) -> list[Tensor]:
        return [*super().each(latent)[:-1], self.heads[-1](latent.sin())]


class OneRequest(nn.Module):
    """Absorbed by hand, and no dimension for requests."""

    def __init__(self) -> None:
        super().__init__()
        self.w_k = nn.Parameter(torch.randn(HEADS, NOPE, RANK) / 4)
        self.w_v = nn.Parameter(torch.randn(HEADS, VALUE, RANK) / 4)

    def forward(self, q: Tensor, q_rope: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        absorbed = torch.einsum("thn,hnr->thr", q, self.w_k)
        scores = torch.einsum("thr,sr->hts", absorbed, latent) + torch.einsum("thd,sd->hts", q_rope, rope)
        probabilities = (scores * (NOPE + ROPE) ** -0.5).softmax(-1)
        return torch.einsum("thr,hvr->thv", torch.einsum("hts,sr->thr", probabilities, latent), self.w_v)


class ReadBack(Computed):
    """Keys and values go into caches, and are read from there in the same graph."""

    def forward(self, x: Tensor, latent: Tensor, rope: Tensor) -> Tensor:  # type: ignore[override]
        k, v = self.keys(latent, rope)
        batch, _, tokens, _ = k.shape
        k_cache, v_cache = k.new_zeros(batch, HEADS, 32, NOPE + ROPE), v.new_zeros(batch, HEADS, 32, VALUE)
        k_cache[:, :, :tokens], v_cache[:, :, :tokens] = k, v
        q = self.q_proj(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        weights = (q @ k_cache[:, :, :tokens].mT * self.scale).softmax(-1)
        return (weights @ v_cache[:, :, :tokens]).transpose(1, 2).flatten(2)


MATCHED: tuple[type[nn.Module], ...] = (
    Merged,
    Decomposed,
    Rounded,
    RowByRow,
    OneScale,
    Packed,
    InWords,
    InHalves,
    Spectral,
    Beside,
    Two,
    EightBits,
    LayerPerHead,
    OneRequest,
    ReadBack,
)


def inputs(cls: type[nn.Module]) -> list[Tensor]:
    if cls is OneRequest:
        return [torch.randn(*sizes) for sizes in ((5, HEADS, NOPE), (5, HEADS, ROPE), (CACHED, RANK), (CACHED, ROPE))]
    return [torch.randn(2, many, width) for many, width in ((5, WIDTH), (CACHED, RANK), (CACHED, ROPE))]


@pytest.mark.parametrize(
    "cls",
    [*MATCHED, OfOthers, Bent, OfTheQueries, RowsOfTokens, SpectralOfAToken, OneHeadApart],
    ids=lambda cls: cls.__name__,
)
def test_numbers_and_gradients(cls: type[nn.Module]) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    module = cls()
    own = [x.requires_grad_() for x in inputs(cls)]
    theirs = copies(own)
    report = kdacompile.explain(module, options=EAGER)(*own)
    assert [match.pattern for match in report.matches] == ["mla"] * (cls in MATCHED), str(report)
    assert cls is OneRequest or not report.matches or set(report.matches[0].roles) == set(PLAIN)
    expected = module(*theirs)
    assert worst_error(report.result, expected) < 1e-5, str(report)
    cotangent, parameters = torch.randn_like(expected), list(module.parameters())
    found = torch.autograd.grad(report.result, [*own, *parameters], cotangent, allow_unused=True)
    wanted = torch.autograd.grad(expected, [*theirs, *parameters], cotangent, allow_unused=True)
    for x, y in zip(found, wanted, strict=True):
        assert (x is None) == (y is None) and (x is None or worst_error(x, y) < 1e-4)


@pytest.mark.parametrize("trains", (False, True))
def test_spectral_norm_of_torch(trains: bool) -> None:
    """As torch's parametrisation computes it: training writes the vectors."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    module = Expanded().train(trains)
    torch.nn.utils.parametrizations.spectral_norm(module.kv_b_proj)
    eager, own = copy.deepcopy(module), [x.requires_grad_() for x in inputs(Expanded)]
    theirs = copies(own)
    report = kdacompile.explain(module, options=EAGER)(*own)
    assert [match.pattern for match in report.matches] == ["mla"], str(report)
    expected = eager(*theirs)
    assert worst_error(report.result, expected) < 1e-5, str(report)
    cotangent = torch.randn_like(expected)
    found = torch.autograd.grad(report.result, [*own, *module.parameters()], cotangent)
    wanted = torch.autograd.grad(expected, [*theirs, *eager.parameters()], cotangent)
    assert all(worst_error(x, y) < 1e-4 for x, y in zip(found, wanted, strict=True))
    assert all(worst_error(x, y) < 1e-5 for x, y in zip(module.buffers(), eager.buffers(), strict=True))


class BesideALoop(nn.Module):
    """A layer of linear attention, which is lifted, and one of MLA with an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Beside()

    def forward(self, x: Tensor, latent: Tensor, rope: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        return self.attention(x, latent, rope) + recurrent_gla(q, k, v, g).sum((-1, -2))[..., None]


def test_adapters_at_other_lengths() -> None:
    """The length stays open where something is lifted: adapters are merged at other lengths too."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    module, length = BesideALoop(), 9
    gates = [torch.randn(2, length, LOOP, 8) for _ in range(3)], -torch.rand(2, length, LOOP, 8)
    own = [torch.randn(2, length, width) for width in (WIDTH, RANK, ROPE)]
    with torch.no_grad():
        report = kdacompile.explain(module, options=EAGER)(*own, *gates[0], gates[1])
        assert [match.pattern for match in report.matches] == ["gla", "mla"], str(report)
        assert worst_error(report.result, module(*own, *gates[0], gates[1])) < 1e-5

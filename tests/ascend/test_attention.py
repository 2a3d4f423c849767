"""Latent attention on Ascend: its kernels through the real compiler against the plan, and executed on this CPU."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kdacompile.lowering.ascend.attention import attention_module, attention_plan
from kdacompile.lowering.ascend.attention_launch import check_layout
from kdacompile.lowering.ascend.launch import Launch
from kdacompile.lowering.ascend.npu import EmittedAttention
from kdacompile.lowering.errors import CapacityError
from kdacompile.lowering.target import ASCEND910_95, ASCEND910B, TARGETS
from kdacompile.ops.fused import FusedAttention
from tests.ascend.cases import CORES
from tests.ascend.damage import NOTHING, ORDERS, RACE, WAIT, damage_is_caught
from tests.ascend.layout import TEMPORARIES, on_chip, within_capacity
from tests.ascend.tools import ARCH, NEXT_ARCH, SimulatedDevice, ToolError, Tools
from tests.lowering.verify import relative_error
from tests.ops.mla_cases import MlaCase, make_mla

TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 8e-4, torch.float32: 2e-6}
IO = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
SIZES = {"K": 512, "ROPE": 64, "PARTS": 1, "MASK": 0, "PAGE": 0, "IN_PAGE": 1, "LATENT_ROW": 576, "ROPE_ROW": 576}
TILES = [(32, 128, torch.bfloat16), (32, 64, torch.bfloat16), (16, 128, torch.float16), (32, 64, torch.float32)]


def constants(heads: int, block: int, **sizes: int) -> dict[str, int]:
    return {**SIZES, "H": 4 * heads, "TILE": heads, "TILES": 4, "C": block, **sizes}


@pytest.mark.parametrize(("parts", "mask"), [(1, 0), (8, 1), (1, 2)])
@pytest.mark.parametrize(("heads", "block", "io"), TILES)
def test_compiles_as_planned(tools: Tools, heads: int, block: int, io: torch.dtype, parts: int, mask: int) -> None:
    """Workspace, hand-overs, flags, every operand of Cube twice and every sum once, tile by tile. ``mask``: 1 for one
    of all heads, 2 for one of every head."""
    made = attention_plan(heads, block, 512, 64, IO[io], masks=mask == 2)
    kernel = attention_module(True, mask == 2).kernel("attend")
    facts = tools.compile(kernel, constants(heads, block, PARTS=parts, MASK=mask), io=io).facts
    assert facts["workspace_bytes"] == made.apart_bytes
    assert facts["handovers"] == made.handovers == 2
    assert facts["crossings"] == made.crossings == 3
    assert facts["cube"]["block_sets"] == facts["vec"]["block_waits"] <= 4
    assert facts["vec"]["block_sets"] == facts["cube"]["block_waits"] <= 5
    assert within_capacity(facts)
    apart = {need.memory: [size for _, size in need.apart] for need in made.needs}
    assert facts["memories"]["L1"]["places"] == sorted(apart["L1"] * 2, reverse=True)
    assert facts["memories"]["L0C"]["places"] == sorted(apart["L0C"], reverse=True)
    least, found, whole = on_chip(made, "scan", facts)["UB"]
    assert least <= found <= 2 * whole + TEMPORARIES


def test_an_oversized_tile_is_refused(tools: Tools) -> None:
    """64 heads by 128 tokens: our error names the tile and the bytes, the compiler's a memory."""
    with pytest.raises(CapacityError, match=r"L0C and .*: 32,768 over\. The largest tile is PC"):
        check_layout(attention_plan(64, 128, 512, 64, "bf16"))
    with pytest.raises(ToolError, match="overflow"):
        tools.compile(attention_module(True).kernel("attend"), constants(64, 128))
    check_layout(attention_plan(32, 128, 512, 64, "bf16"))


def test_deepseek_s_workspace(tools: Tools) -> None:
    """32 heads by 128 tokens, R = 512, D = 64, bf16: scores 16,384, probabilities 8,192, products 65,536."""
    compiled = tools.compile(attention_module(True).kernel("attend"), constants(32, 128))
    assert compiled.facts["workspace_bytes"] == 90_112


@pytest.mark.parametrize("parts", [1, 8])
@pytest.mark.parametrize(("heads", "block", "io"), TILES)
def test_next_generation(tools: Tools, heads: int, block: int, io: torch.dtype, parts: int) -> None:
    kernel = attention_module(True).kernel("attend")
    facts = tools.compile(kernel, constants(heads, block, PARTS=parts), io=io, arch=NEXT_ARCH).facts
    assert facts["workspace_bytes"] == 0 and within_capacity(facts, ASCEND910_95)
    assert facts["handovers"] == 2
    made = attention_plan(heads, block, 512, 64, IO[io], "ascend910_95")
    for memory, (least, found, apart) in on_chip(made, "scan", facts).items():
        assert least <= found, memory
        assert memory == "L0C" or found <= 2 * apart + TEMPORARIES, memory  # of which it gives sums more than they need


@pytest.mark.parametrize("arch", [ARCH, NEXT_ARCH])
def test_the_merge_is_vec_s_alone(tools: Tools, arch: str) -> None:
    facts = tools.compile(attention_module(True).kernel("merge"), constants(8, 128, PARTS=8), arch=arch).facts
    assert facts["workspace_bytes"] == 0 and facts["memories"].keys() == {"UB"}
    assert within_capacity(facts, TARGETS["ascend910_95"] if arch == NEXT_ARCH else ASCEND910B)


# ---- executed


def attend(device: SimulatedDevice, case: MlaCase, cores: int = CORES) -> tuple[Tensor, Tensor]:
    """The op as on an NPU, with the kernels simulated."""
    kernels = EmittedAttention(device, cores)

    def choose(call: Any) -> EmittedAttention:
        assert kernels.declines(call) is None
        return kernels

    o, lse = FusedAttention(choose).attention(*case.positional, **case.options)
    return o, lse


def make(dtype: torch.dtype = torch.bfloat16, **sizes: Any) -> MlaCase:
    """Queries that meet the latent itself, of sizes the simulator is quick with."""
    defaults: dict[str, Any] = {"weights": False, "batch": 2, "tokens": 1, "heads": 32, "rank": 64, "rope": 16}
    return make_mla(dtype=dtype, **{**defaults, **sizes}).with_(scale=0.1)


def errors(found: tuple[Tensor, Tensor], case: MlaCase) -> float:
    """The error of o and of lse, which is +inf just where a query sees nothing."""
    o, lse = case.oracle()
    assert torch.equal(found[1].isinf(), lse.isinf()) and bool((found[0].transpose(1, 2)[lse.isinf()] == 0).all())
    seen = lse.isfinite()
    return max(relative_error(found[0], o), relative_error(found[1][seen], lse[seen]))


CASES: dict[str, dict[str, Any]] = {
    "contiguous": {"cached": 300},
    "lengths": {"cached": 300, "lengths": (300, 129)},
    "nothing cached": {"cached": 200, "lengths": (0, 140)},
    "pages": {"cached": 300, "page": 64, "lengths": (300, 65)},
    "large pages": {"cached": 300, "page": 256, "lengths": (257, 1)},
    "small pages": {"cached": 100, "page": 16, "lengths": (100, 33)},
    "pages of 24": {"cached": 100, "page": 24, "lengths": (100, 25)},
    "pages of 200": {"cached": 300, "page": 200, "lengths": (300, 129)},
    "pages of one token": {"cached": 20, "page": 1, "lengths": (20, 3)},
    "speculative": {"cached": 200, "tokens": 3, "causal": True, "lengths": (130, 2)},
    "no positions": {"cached": 150, "rope": 0},
    "few heads": {"cached": 150, "heads": 5},
    "odd heads": {"cached": 150, "heads": 40, "batch": 1},
    "weights": {"cached": 150, "weights": True, "nope": 16, "value": 24, "form": "absorbed"},
    "sinks": {"cached": 150, "sinks": True},
    "mask": {"cached": 300, "mask": "bool", "lengths": (300, 140)},
    "mask over pages": {"cached": 96, "mask": "bool", "page": 24, "tokens": 2, "lengths": (96, 25)},
    "added masks of heads": {"cached": 150, "mask": "float", "heads": 16},
    "added masks of odd heads over pages": {
        "cached": 96,
        "mask": "float",
        "heads": 40,
        "batch": 1,
        "page": 24,
        "tokens": 2,
    },
    "prompt": {"cached": 40, "tokens": 20, "batch": 1, "heads": 16, "causal": True},
}


@pytest.mark.parametrize("name", CASES)
def test_numbers(tools: Tools, name: str) -> None:
    """Slots past a request's length hold NaN, and its table garbage past its last page. A mask of bools is that of all
    heads, and hides everything from one request."""
    case = make(**CASES[name])
    if (mask := case.tensors["mask"]) is not None and mask.dtype is torch.bool:
        mask[0, :, 0] = False
    assert errors(attend(SimulatedDevice(tools), case), case) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("cores", [1, 20])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_dtypes_whole_and_in_parts(tools: Tools, dtype: torch.dtype, cores: int) -> None:
    case = make(dtype, cached=500, lengths=(500, 70))
    assert errors(attend(SimulatedDevice(tools), case, cores), case) < TOLERANCE[dtype]


def test_deepseek_s_sizes(tools: Tools) -> None:
    """128 heads, R = 512, D = 64, pages of 64 tokens."""
    case = make(batch=1, heads=128, rank=512, rope=64, cached=400, page=64, lengths=(390,))
    device = SimulatedDevice(tools)
    assert errors(attend(device, case), case) < TOLERANCE[torch.bfloat16]
    assert device.compiled["attend"].facts["workspace_bytes"] == 77_824  # blocks of 64 tokens


def test_the_order_of_the_cores_changes_nothing(tools: Tools) -> None:
    case = make(cached=300)
    results = [attend(SimulatedDevice(tools, order), case)[0] for order in itertools.permutations(ORDERS[0])]
    assert all(torch.equal(x, results[0]) for x in results)


def test_long_caches_lose_nothing_to_the_carry(tools: Tools) -> None:
    """4,096 tokens: within 1.2x of rounding nothing but the operands of products."""
    case = make(batch=1, heads=16, cached=4096)
    found, expected = attend(SimulatedDevice(tools), case, cores=1)[0], case.oracle()[0]
    t = case.tensors
    scores = torch.einsum("bthr,bsr->bths", t["q"].double(), t["latent"].double())
    scores += torch.einsum("bthr,bsr->bths", t["q_rope"].double(), t["k_rope"].double())
    weights = (case.scale * (scores - scores.amax(-1, keepdim=True))).exp()
    products = weights.bfloat16().double() @ t["latent"].double()[:, None]
    rounded = (products / weights.sum(-1, keepdim=True)).bfloat16()
    assert relative_error(found, expected) <= 1.2 * relative_error(rounded, expected)


# ---- damaged


DAMAGED = make(batch=1, cached=400)


def is_right(device: SimulatedDevice) -> bool:
    return errors(attend(device, DAMAGED, cores=1), DAMAGED) < TOLERANCE[torch.bfloat16]


def test_a_dropped_wait(tools: Tools) -> None:
    """Each of the waits between the cores in turn."""
    device = SimulatedDevice(tools)
    assert is_right(device)
    facts = device.compiled["attend"].facts
    waits = facts["cube"]["block_waits"] + facts["vec"]["block_waits"]
    assert all(damage_is_caught(tools, "attend", [(WAIT, NOTHING, i)], is_right) for i in range(waits))


def test_all_cores_sharing_one_workspace(tools: Tools) -> None:
    one = (r"(affine_map<\(d0\) -> \(d0 \*) \d+", r"\1 0", -1)
    assert damage_is_caught(tools, "attend", [one], lambda device: bool(attend(device, DAMAGED)), RACE)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("acc0 = A\n", "acc0 = A.to(tl.bfloat16).to(tl.float32)\n"),  # the accumulator in 16 bits
        ("max0 = m\n", "max0 = m_block\n"),
        ("S_scaled + hidden[None, :]", "S_scaled"),  # tokens that do not exist
        ("sum0 * w", "sum0"),
    ],
)
def test_a_wrong_text(tools: Tools, before: str, after: str) -> None:
    """Over 4,096 tokens, so that what is rounded once a block adds up."""
    case = make(batch=1, heads=16, cached=4040)

    class Changed(SimulatedDevice):
        def __call__(self, launch: Launch) -> None:
            text = (launch.kernel.text + "\n").replace(before, after, 1).rstrip("\n")
            assert text != launch.kernel.text
            super().__call__(replace(launch, kernel=replace(launch.kernel, text=text)))

    right, wrong = (errors(attend(kind(tools), case, cores=1), case) for kind in (SimulatedDevice, Changed))
    assert right < 3e-3 and wrong > 1.2 * right


def test_swapped_operands(tools: Tools) -> None:
    """Queries and their rotated part, of one size, in each other's place."""
    case = make(batch=1, rank=16, rope=16, cached=100)

    class Swapped(SimulatedDevice):
        def __call__(self, launch: Launch) -> None:
            values = dict(launch.arguments)
            values["q_ptr"], values["q_rope_ptr"] = values["q_rope_ptr"], values["q_ptr"]
            super().__call__(replace(launch, arguments=values))

    right, wrong = (errors(attend(kind(tools), case, cores=1), case) for kind in (SimulatedDevice, Swapped))
    assert right < TOLERANCE[torch.bfloat16] < wrong

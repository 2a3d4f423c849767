"""Latent attention's emitted Ascend kernels as texts, and the host side of running them.

What the compiler makes of them is tests/ascend's affair.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kdacompile.lowering.ascend.attention import attention_module
from kdacompile.lowering.ascend.attention_launch import block_of, decline, parts_of, run
from kdacompile.lowering.ascend.launch import Launch
from kdacompile.lowering.ascend.npu import EmittedAttention, choose_attention
from kdacompile.lowering.run_attention import Attention
from kdacompile.lowering.scratch import Scratch
from kdacompile.ops import devices
from tests.lowering.test_ascend import GOLDENS

CORES = 20


def call(
    *,
    batch: int = 2,
    queries: int = 1,
    heads: int = 32,
    rank: int = 512,
    rope: int = 64,
    cached: int = 300,
    page: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    **changes: Any,
) -> Attention:
    """A call with a cache of rows [latent | shared], as decoders keep it."""
    pages = (batch * -(-cached // page), page) if page else (batch, cached)
    cache = torch.zeros(*pages, rank + rope, dtype=dtype)
    table = torch.zeros(batch, -(-cached // page), dtype=torch.int64) if page else None
    operands: dict[str, Any] = dict.fromkeys(("w_uk", "w_uv", "mask", "sinks", "lengths"))
    operands |= {"q": torch.zeros(batch, queries, heads, rank, dtype=dtype), "latent": cache[..., :rank]}
    operands |= {"q_rope": torch.zeros(batch, queries, heads, rope, dtype=dtype) if rope else None}
    operands |= {"k_rope": cache[..., rank:] if rope else None, "block_table": table}
    options: dict[str, Any] = {"scale": 0.1, "causal": False, "form": "auto", "out_dtype": dtype}
    return Attention(**{**operands, **options, **changes})


def launches(given: Attention, scratch: Scratch | None = None) -> list[Launch]:
    seen: list[Launch] = []
    o, lse = run(given, CORES, seen.append, scratch)
    assert o.shape[:3] == given.q.shape[:3] and o.dtype is given.out_dtype and o.is_contiguous()
    assert lse.shape == (given.q.shape[0], given.q.shape[2], given.q.shape[1]) and lse.dtype is torch.float32
    return seen


@pytest.mark.parametrize(("rope", "masks"), [(True, False), (False, False), (True, True)])
def test_golden(rope: bool, masks: bool) -> None:
    module = attention_module(rope, masks)
    path = GOLDENS / f"{module.name}.ascend.py.txt"
    if os.environ.get("KDA_ACCEPT") == "1":
        path.write_text(module.source)
    assert path.read_text() == module.source, f"{module.name} changed; KDA_ACCEPT=1 accepts"


def test_the_texts_keep_the_rules_of_the_target() -> None:
    for module in (attention_module(rope, masks) for rope in (True, False) for masks in (True, False)):
        compile(module.source, module.name, "exec")
        assert max(map(len, module.source.splitlines())) <= 130
        assert not re.search(r"tl\.arange\([^)]*\)(\[[^]]*\])? *[<>=]", module.source)
        assert [kernel.cube for kernel in module.kernels] == [True, False]
        for kernel in module.kernels:
            body = kernel.text.split("):\n", 1)[1]
            assert all(re.search(rf"\b{a.name}\b", body) for a in kernel.arguments)
            assert set(re.findall(r"tl\.dot\((\w+),", kernel.text)) <= {"left"}  # loaded or made for that product alone


def test_one_kernel_where_there_are_tasks_enough() -> None:
    (attend,) = launches(call(batch=8, heads=128))
    assert attend.grid == CORES and attend.arguments["tasks"] == 8 * 4
    assert {name: attend.constants[name] for name in ("TILE", "TILES", "PARTS", "C", "PAGE")} == {
        "TILE": 32, "TILES": 4, "PARTS": 1, "C": 128, "PAGE": 0,
    }  # fmt: skip
    assert attend.constants["LATENT_ROW"] == attend.constants["ROPE_ROW"] == 576  # read where it lies


def test_the_cache_is_cut_where_cores_would_be_idle() -> None:
    """Two requests of 32 heads on 20 cores: eight parts each, which a kernel on Vec merges by eight heads a task."""
    scratch = Scratch()
    attend, merge = launches(call(cached=4096), scratch)
    assert (attend.grid, attend.arguments["tasks"], attend.constants["PARTS"]) == (16, 16, 8)
    assert (merge.grid, merge.arguments["tasks"], merge.constants["TILE"]) == (8, 8, 8)
    assert merge.arguments["acc_ptr"] is attend.arguments["acc_ptr"]
    assert scratch.allocated_bytes == 2 * 8 * 32 * (512 + 2) * 4
    assert [parts_of(1, n, CORES) for n in (1, 3, 20, 100)] == [1, 2, 16, 16]
    assert parts_of(40, 100, CORES) == 1


def test_what_a_query_sees() -> None:
    def visible(given: Attention) -> list[int]:
        x = launches(given)[0].arguments["visible_ptr"]
        assert isinstance(x, Tensor) and x.dtype is torch.int32
        return x.tolist()

    lengths = torch.tensor([300, 0])
    assert visible(call()) == [300, 300]
    assert visible(call(lengths=lengths)) == [300, 0]
    assert visible(call(lengths=lengths, queries=3)) == [300, 300, 300, 0, 0, 0]
    assert visible(call(lengths=lengths, queries=3, causal=True)) == [298, 299, 300, 0, 0, 0]


def test_blocks_lie_in_one_page_and_fit_twice() -> None:
    assert [block_of(call(page=page)) for page in (0, 16, 64, 96, 128, 256)] == [128, 16, 64, 32, 128, 128]
    # where no block divides a page, its last one is short
    assert [block_of(call(page=page)) for page in (1, 17, 24, 40, 200)] == [16, 32, 32, 64, 128]
    assert block_of(call(dtype=torch.float32)) == 64
    (attend, *_) = launches(call(page=256, cached=1024))
    assert (attend.constants["PAGE"], attend.constants["IN_PAGE"], attend.arguments["pages"]) == (256, 2, 4)
    table = attend.arguments["table_ptr"]
    assert isinstance(table, Tensor) and table.dtype is torch.int32


def test_weights_go_around_the_kernel() -> None:
    """q through w_uk before, o through w_uv after; q_rope as it is."""
    w_uk, w_uv = torch.randn(32, 128, 512).bfloat16(), torch.randn(32, 128, 512).bfloat16()
    given = call(w_uk=w_uk, w_uv=w_uv, form="absorbed")
    q = torch.randn(2, 1, 32, 128).bfloat16()
    seen: list[Launch] = []
    o, _ = run(replace(given, q=q), CORES, seen.append)
    assert o.shape == (2, 1, 32, 128)
    inner = seen[0].arguments["q_ptr"]
    assert isinstance(inner, Tensor)
    torch.testing.assert_close(inner, torch.einsum("bthn,hnr->bthr", q, w_uk))


def test_masks_are_added_to_the_scores() -> None:
    """In fp32, read where they lie along what they are the same for."""
    seen = torch.rand(2, 1, 3, 300) > 0.5
    (attend, *_) = launches(call(queries=3, mask=seen))
    mask = attend.arguments["mask_ptr"]
    assert isinstance(mask, Tensor) and mask.dtype is torch.float32
    assert torch.equal(mask == 0, seen) and torch.equal(mask.isneginf(), ~seen)
    strides = [attend.arguments[f"mask_{name}"] for name in ("batch", "query")]
    assert attend.constants["MASK"] == 1 and strides == [900, 300]
    (attend, *_) = launches(call(queries=3, mask=torch.zeros(2, 1, 1, 300).bfloat16()))
    assert [attend.arguments[f"mask_{name}"] for name in ("batch", "query")] == [300, 0]
    assert launches(call())[0].constants["MASK"] == 0
    (attend, *_) = launches(call(queries=3, mask=torch.zeros(1, 32, 3, 300)))
    assert [attend.arguments[f"mask_{name}"] for name in ("batch", "head", "query")] == [0, 900, 300]
    assert attend.module.name == "latent_attention_masks" and attend.constants["C"] == 128


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"queries": 512, "w_uk": torch.zeros(32, 512, 512), "w_uv": torch.zeros(32, 128, 512)}, "many queries"),
        ({"rank": 384}, "rank 384"),
        ({"dtype": torch.float64}, "not of one dtype"),
        ({"q": torch.zeros(2, 1, 32, 512)}, "not of one dtype"),
        ({"latent": torch.zeros(2, 512, 300).bfloat16().mT}, "do not lie together"),
    ],
)
def test_what_the_kernels_do_not_take(change: dict[str, Any], reason: str) -> None:
    assert reason in str(decline(call(**change)))


def test_dispatch() -> None:
    assert decline(call()) is None
    assert EmittedAttention().declines(call()) == "triton-ascend is not installed"
    assert EmittedAttention(lambda launch: None, CORES).declines(call()) is None
    assert choose_attention(call()) is None  # not on an NPU
    assert devices.npu.choose_attention is choose_attention

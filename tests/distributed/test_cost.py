"""What context parallelism sends, and that the document says the same."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kdacompile import plan
from kdacompile.__main__ import main
from kdacompile.distributed.cost import Layer, ParallelPlan, communication
from kdacompile.lowering.errors import ArgumentError
from kdacompile.lowering.plan.cost import total_flops
from kdacompile.lowering.stages import evaluate
from kdacompile.ops.errors import ContextParallelError

PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"


def kda(tokens: int) -> Layer:
    return Layer(tokens=tokens, heads=32, value_heads=32, keys=128, values=128)


def test_a_map_is_two_matrices_of_float32_with_the_delta_rule_and_a_column_without() -> None:
    assert kda(1).map_bytes == 4 * 32 * 128 * (128 + 128)
    assert Layer(1, 32, 32, 128, 128, delta=False).map_bytes == 4 * 32 * 128 * (128 + 1)


def test_maps_cost_the_same_for_any_length_and_operands_do_not() -> None:
    maps = {communication(kda(tokens), 8).sent for tokens in (1 << 14, 1 << 20)}
    heads = [communication(kda(tokens), 8, method="heads").sent for tokens in (1 << 14, 1 << 20)]
    assert len(maps) == 1 and heads[1] == heads[0] * 64


def test_a_plan_of_a_rank_counts_one_pass_of_more_columns_and_one_product() -> None:
    sizes: Any = {"T": 1 << 17, "H": 32, "K": 128, "V": 128}
    alone, rank = plan("kda", "cpu", **sizes), plan("kda", "cpu", ranks=2, **sizes)
    more: Any = {**sizes, "T": 1 << 16, "V": 256}
    wide = plan("kda", "cpu", **more)
    product = 2 * 32 * (1 << 16) * 128 * 128
    assert isinstance(rank, ParallelPlan) and rank.sizes == wide.sizes and not rank.two_passes
    assert rank.forward.rank_flops == evaluate(total_flops(wide), wide.sizes) + product
    assert rank.forward.alone_flops == evaluate(total_flops(alone), alone.sizes)
    assert rank.backward.rank_flops == rank.backward.alone_flops // 2 + product
    assert rank.forward.sends[0] == communication(kda(1 << 17), 2)


def test_a_plan_of_a_rank_on_hopper_counts_a_second_scan() -> None:
    """Of states alone: ``W S`` and ``K^T V_new``, 2 C K columns each, and the decay of the state."""
    sizes: Any = {"T": 1 << 17, "H": 32, "K": 128, "V": 128}
    rank = plan("kda", "cuda_sm90", ranks=2, **sizes)
    assert isinstance(rank, ParallelPlan) and rank.two_passes and rank.sizes["V"] == 128
    chunks = 32 * (1 << 16) // rank.sizes["C"]
    scan = chunks * (4 * rank.sizes["C"] * 128 + 128) * 256
    assert rank.forward.rank_flops == rank.forward.alone_flops // 2 + scan
    assert rank.backward.alone_flops // 2 < rank.backward.rank_flops < rank.backward.alone_flops // 2 + scan
    assert "a rank sends 8.4 MB" in str(rank) and "two scans" in str(rank) and "it waits for the maps" in str(rank)
    assert not plan("kda", "cuda_sm90", io="fp32", ranks=2, **sizes).two_passes  # type: ignore[attr-defined]


def test_a_backward_call_sends_what_is_asked_of_states_alone_unless_in_steps() -> None:
    layer = kda(1 << 17)
    forward, back = (communication(layer, 8, backward=backward) for backward in (False, True))
    assert 2 * back.sent == forward.sent
    assert communication(layer, 64, backward=True) == communication(layer, 64)


def test_a_plan_of_many_ranks_counts_what_runs_beside_the_messages() -> None:
    """Half of a call, where key heads can be halved and the ranks are more than a host's."""
    sizes: Any = {"T": 1 << 20, "H": 32, "K": 128, "V": 128}
    rank = plan("kda", "cuda_sm90", ranks=16, **sizes)
    assert isinstance(rank, ParallelPlan) and rank.overlap and rank.forward.beside_flops == rank.forward.rank_flops // 2
    found = rank.as_data()
    assert found["backward"]["beside_flops"] == rank.backward.beside_flops
    hidden = rank.forward.beside_flops / rank.forward.sends[0].seconds / 1e12
    assert f"hidden below {hidden:,.0f}e12 a second" in str(rank)
    assert str(rank).count("GB/s, and waits for it") == 2  # over heads, forward and backward
    assert "the halo of a short convolution before it, width - 1 tokens; a rank waits for that" in str(rank)
    assert "the first message of each half" in str(plan("kda", "cuda_sm90", ranks=64, **sizes))
    odd: Any = {**sizes, "H": 3}
    for alone in (plan("kda", "cuda_sm90", ranks=8, **sizes), plan("kda", ranks=16, **odd)):
        assert isinstance(alone, ParallelPlan) and not alone.overlap
        assert alone.as_data()["forward"]["beside_flops"] == 0


@pytest.mark.parametrize("name", ["kda", "gated_delta_rule", "gla", "simple_gla"])
def test_the_document_says_how_much_work_all_ranks_do(name: str) -> None:
    sizes: Any = {"T": 1 << 17, "H": 32, "K": 128, "V": 128}
    found: list[str] = []
    for target in ("cpu", "cuda_sm90"):
        rank = plan(name, target, ranks=2, **sizes)
        assert isinstance(rank, ParallelPlan)
        found += [f"{2 * call.rank_flops / call.alone_flops:.2f}" for call in (rank.forward, rank.backward)]
    assert f"| {' | '.join([name, *found])} |" in PAGE.read_text()


def test_a_plan_of_a_rank_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "gla", "--target", "cpu", "--ranks", "48", "--order", "contiguous", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["parallel"]
    assert [sent["method"] for sent in found["forward"]["sends"]] == ["maps"]  # 48 ranks do not divide 16 heads
    with pytest.raises(ArgumentError, match="ranks=2 for mla"):
        plan("mla", ranks=2)
    with pytest.raises(ArgumentError, match="ranks=2 for kda, token"):
        plan("kda", form="token", ranks=2)


def test_the_document_has_these_figures() -> None:
    rows = re.findall(r"^\| ([\d,]+) \| ([\d,]+) \| ([\d,.]+) MB \| (.*?) \|$", PAGE.read_text(), re.MULTILINE)
    assert len(rows) == 4
    for ranks, tokens, maps, heads in rows:
        count, layer = int(ranks.replace(",", "")), kda(int(tokens.replace(",", "")))
        assert maps == f"{communication(layer, count).sent / 1e6:,.1f}"
        if count > layer.heads:
            assert heads == "32 heads are too few"
            with pytest.raises(ContextParallelError, match="cannot divide the 32 heads"):
                communication(layer, count, method="heads")
        else:
            assert heads == f"{communication(layer, count, method='heads').sent / 1e6:,.1f} MB"

"""What context parallelism sends, and that the document says the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kdacompile.distributed.cost import Layer, communication
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

"""Context parallelism in processes over gloo: a rank's results and gradients are those of one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from kdacompile.distributed import ContextParallel, causal_conv1d
from kdacompile.distributed.parallel_call import ParallelCall
from kdacompile.ops import mla
from kdacompile.ops.errors import ContextParallelError, OpError
from tests.distributed.processes import in_processes, one_rank

if not dist.is_available():
    pytest.skip("torch was built without torch.distributed", allow_module_level=True)

TWO = (
    "rows_of_the_family", "rounding_of_bf16", "convolution", "latent_attention", "latent_attention_of_documents",
    "under_compile", "ranks_that_differ", "dtensors_cut_otherwise", "checkpoint_of_a_state",
    "a_rank_that_does_not_come", "example",
)  # fmt: skip
MODELS = (
    "recurrences_and_convolutions", "latents", "region_of_torch", "region_of_torch_with_softmax",
    "refused_in_region_of_torch", "refused",
)  # fmt: skip
THREE = (
    "fragments_of_many_lengths",
    "convolution_of_few_tokens",
    "gate_functions_and_layouts",
    "maps_in_steps",
    "tokens_of_dtensors",
)


def checks(names: Sequence[str]) -> list[str]:
    return [f"tests.distributed.checks:{name}" for name in names]


def test_two_ranks(tmp_path: Path) -> None:
    """With the ops on DTensors that are sharded by batch or by heads."""
    in_processes([*checks(TWO), "tests.distributed.passes:two_passes", "tests.ops.sharded:on_shards"], 2, tmp_path)


def test_models_on_two_ranks(tmp_path: Path) -> None:
    in_processes([f"tests.distributed.models:{name}" for name in MODELS], 2, tmp_path)


@pytest.mark.skipif(
    torch.__version__.startswith("2.11."),
    reason="torch.nn.Linear of torch 2.11 flattens [B, T], which it cannot where a DTensor is cut along T",
)
def test_activations_of_dtensors(tmp_path: Path) -> None:
    in_processes(["tests.distributed.models:activations_of_dtensors"], 2, tmp_path)


@pytest.mark.parametrize("world", [2, 3])
def test_halves_that_take_turns(world: int, tmp_path: Path) -> None:
    names = ("in_turn", "numbers", "parameters_and_odd_heads")
    in_processes([f"tests.distributed.turns:{name}" for name in names], world, tmp_path)


def test_three_ranks(tmp_path: Path) -> None:
    in_processes([*checks(THREE), "tests.distributed.passes:two_passes"], 3, tmp_path)


def test_meshes_of_four_ranks(tmp_path: Path) -> None:
    names = ("groups_of_a_mesh", "tokens_and_more", "heads_that_do_not_divide")
    in_processes([f"tests.distributed.meshes:{name}" for name in names], 4, tmp_path)


def test_eight_ranks(tmp_path: Path) -> None:
    in_processes(["tests.distributed.meshes:steps_of_many"], 8, tmp_path)


@pytest.mark.parametrize(("dtype", "passing"), [(torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)])
def test_states_that_enter_are_in_range(dtype: torch.dtype, passing: torch.dtype) -> None:
    x = torch.empty(1, 4, 2, 16, dtype=dtype, device="meta")
    more: Any = {"scale": 1.0, "delta": True, "gate": "none", "group": "0", "ranks": 2, "order": "contiguous"}
    call = ParallelCall(x, x, x, None, None, None, **more)
    assert call.passing_dtype is passing and call.cuts == 0 and call.results[5] == ((1, 4, 2, 16), passing)


@pytest.fixture
def group() -> Iterator[None]:
    with one_rank():
        yield


def test_no_process_group_is_said() -> None:
    with pytest.raises(ContextParallelError, match=r"call torch\.distributed\.init_process_group"):
        ContextParallel()


@pytest.mark.usefixtures("group")
def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(ContextParallelError, match="method must be one of maps, heads"):
        ContextParallel(method="ring")
    context, x = ContextParallel(), torch.randn(1, 4, 6)
    with pytest.raises(OpError, match=r"weight must have shape \(6, 3\)"):
        causal_conv1d(x, torch.randn(5, 3), context_parallel=context)
    with pytest.raises(OpError, match="activation must be"):
        causal_conv1d(x, torch.randn(6, 3), context_parallel=context, activation="relu")
    q, latent = torch.randn(1, 4, 2, 8), torch.randn(1, 4, 8)
    with pytest.raises(ContextParallelError, match="MLA takes no lengths here"):
        mla(q, None, latent, None, scale=1.0, lengths=torch.tensor([3]), context_parallel=context)
    with pytest.raises(ContextParallelError, match="MLA is a prefill here"):
        mla(q[:, :1], None, latent, None, scale=1.0, context_parallel=context)

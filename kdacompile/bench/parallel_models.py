"""Kimi Linear under tensor parallelism beside one GPU: cases of the suite of several GPUs.

Four layers of the real sizes with dense feed-forward layers, as the cuda suite has them, in bf16, sharded by the plan
that transformers has for the model (``tp_plan="auto"``), compiled on both sides.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kdacompile.bench import cuda_models
from kdacompile.bench.ranks import interleaved, slowest
from kdacompile.bench.record import Figures

LENGTH = 16384


def measured(what: str) -> Figures:
    """``prefill``: the logits of the last token; ``training``: forward and backward of a sum over the last layer."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    from kdacompile.report.collect import collecting

    model = cuda_models.build("kimi_linear")
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        model.save_pretrained(folder[0])
    dist.barrier()
    plan = DistributedConfig(tp_plan="auto", tp_size=dist.get_world_size())
    sharded = AutoModelForCausalLM.from_pretrained(
        Path(folder[0]), distributed_config=plan, attn_implementation="sdpa", dtype=torch.bfloat16
    ).eval()
    ids = torch.randint(3, model.config.vocab_size, (1, LENGTH), device="cuda")
    dist.broadcast(ids, 0)
    with collecting() as report:
        calls = [_call(torch.compile(each, backend="kda"), ids, train=what == "training") for each in (model, sharded)]
        found = interleaved(*calls)
    hidden = torch.zeros(1, LENGTH, model.config.hidden_size, device="cuda", dtype=torch.bfloat16)
    reductions = 2 * model.config.num_hidden_layers * (2 if what == "training" else 1)
    sent = reductions * slowest(lambda: dist.all_reduce(hidden), 10)
    return found | {"communication_us": sent, "length": LENGTH, "matches": dict(report.counts)}


def _call(model: Any, ids: Tensor, *, train: bool) -> Any:
    def prefill() -> Any:
        with torch.no_grad():
            return model(input_ids=ids, use_cache=False, logits_to_keep=1).logits

    def training() -> None:
        model.zero_grad(set_to_none=True)
        model(input_ids=ids, use_cache=False, logits_to_keep=1).logits.float().square().mean().backward()

    return training if train else prefill

"""Models on several processes: the checks of ``test_parallel.py``.

Each is compared with the same model on one process: results, gradients, and how many layers are matched.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from examples.tensor_parallel import Block
from examples.tensor_parallel import tensor_parallel as shard_heads
from kdacompile.distributed import ContextParallel
from kdacompile.report.collect import collecting
from tests.backend.layers import gated_delta_loop
from tests.distributed.processes import Ranks
from tests.models import mla_zoo, zoo

EAGER: dict[str, Any] = {"kda.inner": "aot_eager"}
HEADS: dict[str, Any] = {name: ColwiseParallel() for name in ("q", "k", "v", "gate", "beta")} | {
    "out": RowwiseParallel()
}


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def close(have: Tensor, want: Tensor, what: str) -> None:
    torch.testing.assert_close(whole(have).detach(), want.detach(), rtol=2e-4, atol=2e-5, msg=lambda m: f"{what}: {m}")


class Recurrent(nn.Module):
    """The gated delta rule between projections, all heads of a projection beside each other; any number of heads."""

    def __init__(self, heads: int = 4, size: int = 8) -> None:
        super().__init__()
        self.size = size
        self.q, self.k, self.v = (nn.Linear(32, heads * size, bias=False) for _ in range(3))
        self.gate, self.beta = nn.Linear(32, heads), nn.Linear(32, heads)
        self.out = nn.Linear(heads * size, 32, bias=False)

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        q, k, v = (project(x).unflatten(-1, (-1, self.size)) for project in (self.q, self.k, self.v))
        gate, beta = -F.softplus(self.gate(x)), self.beta(x).sigmoid()
        return self.out(gated_delta_loop(q, F.normalize(k, dim=-1), v, gate, beta).flatten(-2))


def block(
    prepare: Callable[[nn.Module], None],
    *,
    made: type[nn.Module] = Block,
    inference: bool = True,
    place: Callable[[Tensor], Tensor] = Tensor.clone,
) -> None:
    """Two layers, forward and backward, compiled layer by layer as torchtitan does; ``place``: a rank's activations."""
    torch.manual_seed(0)
    alone = nn.ModuleList([made() for _ in range(2)])
    torch.manual_seed(0)
    model = nn.ModuleList([made() for _ in range(2)])
    prepare(model)
    for layer in model:
        layer.compile(backend="kda", options={**EAGER, "kda.cost_model": False})
    x, cos = torch.randn(4, 8, 32), torch.randn(8, 1, 4)

    def run(layers: nn.ModuleList, given: Tensor) -> Tensor:
        for layer in layers:
            given = given + layer(given, cos)
        return given

    want = run(alone, x)
    want.square().mean().backward()
    with collecting() as report:
        have = run(model, place(x))
        (have.square().sum() / want.numel()).backward()
    pattern = "mla" if made is Block else "gated_delta_rule"
    # The second layer may use the first one's code.
    assert set(report.counts) == {pattern} and report.counts[pattern] in (1, 2), report
    close(have, place(want), "result")
    for (name, ours), (_, theirs) in zip(model.named_parameters(), alone.named_parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None, name
        close(ours.grad, theirs.grad, name)
    if inference:
        with torch.no_grad():
            close(run(model, place(x)), place(want), "inference")


def transformers_plan(name: str, shared: Path) -> None:
    """``from_pretrained(tp_plan="auto")``: a prompt, and steps over its cache."""
    from transformers import AutoModelForCausalLM, DynamicCache
    from transformers.distributed import DistributedConfig
    from transformers.integrations import accelerate

    # transformers asks for accelerate as soon as there is a plan, and uses nothing of it to shard a model.
    accelerate.is_accelerate_available = lambda: True
    case = mla_zoo.CASES.get(name)
    model = case.build("sdpa") if case else _with_heads_for_all(name)
    folder = shared / name
    layers = case.attentions + bool(case.linear) if case else zoo.CASES[name].layers
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    plan = DistributedConfig(tp_plan="auto", tp_size=dist.get_world_size())
    sharded = AutoModelForCausalLM.from_pretrained(folder, distributed_config=plan, attn_implementation="sdpa").eval()
    assert any(isinstance(x, DTensor) for x in sharded.parameters())
    compiled = torch.compile(sharded, backend="kda", options={**EAGER, "kda.cost_model": False})
    caches = DynamicCache(config=model.config), DynamicCache(config=model.config)
    with torch.no_grad(), collecting() as report:
        for ids in (mla_zoo.tokens(17), mla_zoo.tokens(1, seed=1), mla_zoo.tokens(1, seed=2)):
            have = compiled(input_ids=ids, past_key_values=caches[0], use_cache=True).logits
            want = model(input_ids=ids, past_key_values=caches[1], use_cache=True).logits
            close(have, want, f"{name}, {ids.shape[1]} tokens")
    modes = [match.mode for match in report.matches]
    assert modes.count("sequence") == layers and modes.count("step") >= layers, report


def _with_heads_for_all(name: str) -> Any:
    """A model whose other layers, too, have a key head for each rank."""
    case = zoo.CASES[name]
    config = case.config()
    config.num_key_value_heads = dist.get_world_size()  # type: ignore[attr-defined]
    return zoo.random_model(config, case.model_class, "sdpa", 0).eval()


def tensor_parallel(ranks: Ranks) -> None:
    mesh = DeviceMesh("cpu", list(range(ranks.world)))
    block(lambda model: _tensor_parallel(model, mesh))


def sharded_data_parallel(ranks: Ranks) -> None:
    mesh = DeviceMesh("cpu", list(range(ranks.world)))
    block(lambda model: _fsdp(model, mesh))


def checkpoints(ranks: Ranks) -> None:
    """Weights that FSDP2 x TP saves on all ranks are loaded by one process, and by FSDP2 alone."""
    mesh = init_device_mesh("cpu", (2, ranks.world // 2), mesh_dim_names=("dp", "tp"))
    saved, alone, sharded = (nn.ModuleList([Recurrent() for _ in range(2)]) for _ in range(3))
    want = [parameter.detach().clone() for parameter in saved.parameters()]
    for layer in saved.children():
        parallelize_module(layer, mesh["tp"], HEADS)
    _fsdp(saved, mesh["dp"])
    _fsdp(sharded, DeviceMesh("cpu", list(range(ranks.world))))
    folder = ranks.folder / "weights"
    checkpoint.save(get_model_state_dict(saved), checkpoint_id=folder)
    checkpoint.load(get_model_state_dict(alone), checkpoint_id=folder, no_dist=True)
    checkpoint.load(get_model_state_dict(sharded), checkpoint_id=folder)
    for loaded in (alone, sharded):
        for have, x in zip(loaded.parameters(), want, strict=True):
            torch.testing.assert_close(whole(have).detach(), x, rtol=0, atol=0)


def both(ranks: Ranks) -> None:
    mesh = init_device_mesh("cpu", (2, ranks.world // 2), mesh_dim_names=("dp", "tp"))

    def prepare(model: nn.Module) -> None:
        _tensor_parallel(model, mesh["tp"])
        _fsdp(model, mesh["dp"])

    block(prepare, inference=False)  # which the others have, on fewer processes


def recurrences(ranks: Ranks) -> None:
    """Column-wise q, k, v, gate and beta, row-wise output; FSDP2 over the other dimension, activations checkpointed."""
    mesh = init_device_mesh("cpu", (ranks.world // 2, 2), mesh_dim_names=("dp", "tp"))

    def prepare(model: nn.Module, checkpointed: bool) -> None:
        for name, layer in list(model.named_children()):
            parallelize_module(layer, mesh["tp"], HEADS)
            if checkpointed:
                setattr(model, name, checkpoint_wrapper(layer))
            if ranks.world > 2:
                fully_shard(model.get_submodule(name), mesh=mesh["dp"])

    for checkpointed in (False, True):
        torch.compiler.reset()
        block(lambda model, on=checkpointed: prepare(model, on), made=Recurrent, inference=not checkpointed)


def deepseek_v3(ranks: Ranks) -> None:
    transformers_plan("deepseek_v3", ranks.folder)


def kimi_linear(ranks: Ranks) -> None:
    transformers_plan("kimi_linear", ranks.folder)


def qwen3_next(ranks: Ranks) -> None:
    transformers_plan("qwen3_next", ranks.folder)


def sequence_parallel(ranks: Ranks) -> None:
    """Tokens on ranks between the layers, heads in them: gathered before attention, scattered behind."""
    mesh = DeviceMesh("cpu", list(range(ranks.world)))

    def prepare(model: nn.Module) -> None:
        for layer in model.children():
            shard_heads(layer, mesh, tokens=True)

    # Contiguous: with other strides than the next layer's input has, sizes open, and Dynamo cannot have such DTensors.
    block(prepare, place=lambda x: x.chunk(ranks.world, 1)[ranks.rank].contiguous())


def context_parallel_model(ranks: Ranks) -> None:
    """All of kimi_linear, KDA and latent attention, on a rank's tokens; its latent attention needs no positions."""
    length = 16 * ranks.world
    context = ContextParallel(order="zigzag", total_length=length)
    model, ids = mla_zoo.CASES["kimi_linear"].build("sdpa"), mla_zoo.tokens(length)
    want = model(input_ids=ids, use_cache=False).logits
    weight = torch.linspace(-1, 1, want.numel()).view_as(want)
    (want * weight).sum().backward()
    expected = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    model.zero_grad()
    options: Any = {**EAGER, "kda.context_parallel": context}
    with collecting() as report:
        mine = context.shard(ids)
        have = torch.compile(model, backend="kda", options=options)(input_ids=mine, use_cache=False).logits
        (have * context.shard(weight)).sum().backward()
    assert report.counts == {"kda": 1, "mla": 1}, report
    close(have, context.shard(want), "result")
    for name, grad in expected.items():
        share = model.get_parameter(name).grad
        assert share is not None, name
        dist.all_reduce(share)
        torch.testing.assert_close(share, grad, rtol=1e-3, atol=1e-3 * float(grad.abs().max()), msg=name)


def _tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    for layer in model.children():
        shard_heads(layer, mesh)


def _fsdp(model: nn.Module, mesh: Any) -> None:
    for layer in model.children():
        fully_shard(layer, mesh=mesh)

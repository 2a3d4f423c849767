"""Training recipes for several GPUs: FSDP2, tensor parallel, or both, for Kimi Linear, Qwen3-Next and DeepSeek-V3.

    torchrun --nproc-per-node 4 examples/recipes.py kimi_linear --tp 2 [--checkpoint] [--quick] [--device cuda]

The models are transformers', with random weights. In this order: tensor parallel, ``compile(backend="kda")`` layer by
layer, activation checkpointing around the compiled layer, FSDP2. Parameters are DTensors, and a module that shares its
heads computes on their local tensors. Layers must be matched, and losses must equal those of one process in eager.
Feed-forward layers are dense: experts have plans of their own in torchtitan and in transformers.
"""

from __future__ import annotations

import argparse
import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

if __package__:
    from examples import deepseek_v3, kimi_linear, qwen3_next
else:
    import deepseek_v3
    import kimi_linear
    import qwen3_next

from kdacompile.report.collect import collecting

VOCABULARY, BATCH, LENGTH = 1024, 4, 70


class Whole(ParallelStyle):
    """A module that every rank computes as a whole."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for owner in module.modules():
            _place(owner, device_mesh, dict.fromkeys(owner._parameters, Replicate()), lambda _, x: x.to_local())
        return module


@dataclass
class Heads(ParallelStyle):
    """A module of whose heads, or hidden channels, every rank of ``device_mesh`` computes some.

    ``dims``: of each parameter that is cut, the dimension. ``packed``: parameters that have several such runs along
    dimension 0, and the attributes with their sizes; every rank keeps them whole and reads its rows. ``sizes``:
    attributes that become a rank's own. What is not named is read as a whole; its gradients are partial sums, as are
    those of the module's input, and the output.
    """

    dims: dict[str, int]
    packed: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    sizes: tuple[str, ...] = ()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        rank, ranks, packed = device_mesh.get_local_rank(), device_mesh.size(), dict[str, list[int]]()
        for name, attributes in self.packed.items():
            packed[name] = [getattr(module, attribute) for attribute in attributes]

        def read(name: str, x: DTensor) -> Tensor:
            if name in self.dims:
                return x.to_local()
            local = x.to_local(grad_placements=[Partial()])
            if name not in packed:
                return local
            return torch.cat([part.chunk(ranks)[rank] for part in local.split(packed[name])])

        for prefix, owner in module.named_modules():
            names = {own: f"{prefix}.{own}".lstrip(".") for own in owner._parameters}
            places = {own: Shard(self.dims[n]) if n in self.dims else Replicate() for own, n in names.items()}
            _place(owner, device_mesh, places, lambda own, x, names=names: read(names[own], x))
        for attribute in self.sizes:
            setattr(module, attribute, getattr(module, attribute) // ranks)
        module.register_forward_pre_hook(
            lambda _, args, kwargs: self._given(device_mesh, args, kwargs), with_kwargs=True
        )
        module.register_forward_hook(lambda _, args, output: self._summed(device_mesh, output))
        return module

    @staticmethod
    def _given(
        mesh: DeviceMesh, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The activations, whose gradient is the sum of the ranks'."""

        def shared(x: Tensor) -> Tensor:
            return DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])

        if args:
            return (shared(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": shared(kwargs["hidden_states"])}

    @staticmethod
    def _summed(mesh: DeviceMesh, output: Any) -> Any:
        x = output[0] if isinstance(output, tuple) else output
        total = (
            DTensor.from_local(x, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()]).to_local()
        )
        return (total, *output[1:]) if isinstance(output, tuple) else total


def _place(owner: nn.Module, mesh: DeviceMesh, places: dict[str, Any], read: Callable[[str, DTensor], Tensor]) -> None:
    """Make a module's own parameters DTensors, which its ``forward`` reads as local tensors.

    Between two calls FSDP2 has them on a mesh of its own.
    """
    readers: dict[str, Any] = {}
    for name, place in places.items():
        parameter = owner._parameters[name]
        if parameter is not None:
            owner.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [place])))
            readers[name] = property(lambda self, name=name: _read(self._parameters[name], name, mesh, read))
    if readers:
        owner.__class__ = type(type(owner).__name__, (type(owner),), readers)


def _read(x: DTensor, name: str, mesh: DeviceMesh, read: Callable[[str, DTensor], Tensor]) -> Tensor:
    return read(name, x) if x.device_mesh == mesh else x


def columns(*names: str) -> dict[str, int]:
    return {f"{name}.weight": 0 for name in names}


FEED_FORWARD = Heads({**columns("gate_proj", "up_proj"), "down_proj.weight": 1})
LATENT = Heads({**columns("q_proj", "q_b_proj", "kv_b_proj"), "o_proj.weight": 1})
SOFTMAX = Heads({**columns("q_proj", "k_proj", "v_proj"), "o_proj.weight": 1})
KDA = Heads(
    {
        **columns("q_proj", "k_proj", "v_proj", "b_proj", "g_b_proj", "forget_gate.f_b_proj"),
        "forget_gate.dt_bias": 0, "forget_gate.A_log": 2, "o_proj.weight": 1,
    },
    packed={"conv1d.weight": ("qkv_dim", "qkv_dim", "qkv_dim")},
    sizes=("qkv_dim",),
)  # fmt: skip
GATED_DELTA_NET = Heads(
    # Both projections are written key head by key head.
    {**columns("in_proj_qkvz", "in_proj_ba"), "dt_bias": 0, "A_log": 0, "out_proj.weight": 1},
    packed={"conv1d.weight": ("key_dim", "key_dim", "value_dim")},
    sizes=("num_k_heads", "num_v_heads", "key_dim", "value_dim"),
)


def _kimi_linear() -> nn.Module:
    return kimi_linear.KimiLinearForCausalLM(kimi_linear.config(heads=4))


def _qwen3_next() -> nn.Module:
    config = qwen3_next.config(key_heads=2, layer_types=["linear_attention", "full_attention"])
    config.num_key_value_heads = 2
    return qwen3_next.Qwen3NextForCausalLM(config)


def _deepseek_v3() -> nn.Module:
    return deepseek_v3.DeepseekV3ForCausalLM(deepseek_v3.config(heads=4))


@dataclass(frozen=True)
class Recipe:
    """A model, the style of each of its layers' modules by its class, and what must be matched."""

    build: Callable[[], nn.Module]
    plan: dict[str, Heads]
    patterns: set[str]


RECIPES = {
    "kimi_linear": Recipe(
        _kimi_linear,
        {"KimiLinearDeltaAttention": KDA, "KimiLinearAttention": LATENT, "KimiLinearMLP": FEED_FORWARD},
        {"kda", "mla"},
    ),
    "qwen3_next": Recipe(
        _qwen3_next,
        {"Qwen3NextGatedDeltaNet": GATED_DELTA_NET, "Qwen3NextAttention": SOFTMAX, "Qwen3NextMLP": FEED_FORWARD},
        {"gated_delta_rule"},
    ),
    "deepseek_v3": Recipe(_deepseek_v3, {"DeepseekV3Attention": LATENT, "DeepseekV3MLP": FEED_FORWARD}, {"mla"}),
}


def parallelize(model: Any, plan: dict[str, Heads], mesh: DeviceMesh, options: Any, *, checkpoint: bool) -> None:
    """Over the dimensions "dp" and "tp" of ``mesh``."""
    tp = mesh["tp"]
    if tp.size() > 1:
        for layer in model.model.layers:
            styles = dict[str, ParallelStyle]()
            for name, child in layer.named_children():
                styles[name] = plan.get(type(child).__name__, Whole())
            parallelize_module(layer, tp, styles)
        outside: tuple[str, ...] = ("model.embed_tokens", "model.norm", "lm_head")
        parallelize_module(model, tp, {name: Whole() for name in outside})
    for index, layer in enumerate(model.model.layers):
        # The other way round AOTAutograd of torch 2.13 would keep a mesh for the backward, and says so, under TP.
        layer.compile(backend="kda", options=options)
        block = checkpoint_wrapper(layer) if checkpoint else layer
        model.model.layers[index] = fully_shard(block, mesh=mesh["dp"]) if mesh["dp"].size() > 1 else block
    if mesh["dp"].size() > 1:
        fully_shard(model, mesh=mesh["dp"])


def steps(
    model: nn.Module, batches: Sequence[Tensor], place: Callable[[Tensor], Tensor]
) -> tuple[list[float], list[Tensor]]:
    """Losses of a step of AdamW for each batch, and the gradients of the first; ``place``: this rank's rows."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, first = list[float](), list[Tensor]()
    for batch in batches:
        tokens = place(batch)
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        first = first or [grad.full_tensor() if isinstance(grad, DTensor) else grad.clone() for grad in grads]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, first


def train(name: str, device: str, tp: int, *, checkpoint: bool, quick: bool) -> bool:
    """Whether every kind of layer was matched, and losses and gradients were those of one process."""
    recipe, dp = RECIPES[name], dist.get_world_size() // tp
    mesh = init_device_mesh(device, (dp, tp), mesh_dim_names=("dp", "tp"))
    torch.compiler.reset()  # of a model before this one: graphs keep its mesh
    torch.manual_seed(0)
    alone = recipe.build().to(device)
    model = copy.deepcopy(alone)
    # On a CPU latent attention trains faster in Inductor, and is left to it unless we ask.
    options = {"kda.cost_model": False, **({"kda.inner": "aot_eager"} if quick else {})}
    parallelize(model, recipe.plan, mesh, options, checkpoint=checkpoint)
    batches = [torch.randint(3, VOCABULARY, (BATCH, LENGTH)).to(device) for _ in range(2 if quick else 20)]
    want, expected = steps(alone, batches, lambda x: x)
    with collecting() as report:
        have, found = steps(model, batches, lambda x: x.chunk(dp)[mesh.get_local_rank("dp")])
    mean = torch.tensor(have, device=device) / dist.get_world_size()
    dist.all_reduce(mean)
    error = max(abs(x / y - 1) for x, y in zip(mean.tolist(), want, strict=True))
    apart = max(float((x - y).norm() / y.norm()) for x, y in zip(found, expected, strict=True))
    if dist.get_rank() == 0:
        print(
            f"{name}: loss {mean[0]:.4f} -> {mean[-1]:.4f}, {error:.1e} from one process, gradients {apart:.1e}; "
            f"matched {report.counts}"
        )
    return set(report.counts) == recipe.patterns and error < 1e-3 and apart < 1e-3


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(RECIPES), help=", ".join(RECIPES))
    parser.add_argument("--tp", type=int, default=1, help="ranks that share the heads of a layer")
    parser.add_argument("--checkpoint", action="store_true", help="compute activations again in the backward")
    parser.add_argument("--quick", action="store_true", help="two steps, and no compiling by Inductor")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args(argv)
    world, started = int(os.environ.get("WORLD_SIZE", "1")), not dist.is_initialized()
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if started:
        alone: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if world == 1 else {}
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo", **alone)
    try:
        done = [train(name, args.device, args.tp, checkpoint=args.checkpoint, quick=args.quick) for name in args.models]
        return 0 if all(done) else 1
    finally:
        if started:
            dist.destroy_process_group()


if __name__ == "__main__":
    raise SystemExit(main())

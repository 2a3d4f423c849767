"""transformers' models with flash-linear-attention installed, whose functions they bind: one graph for all layers."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from kdacompile.report.collect import collecting
from tests.compare import relative_error

pytest.importorskip("fla.ops")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

LINEAR, FULL = "linear_attention", "full_attention"
BATCH, TOKENS = 2, 200
BASE: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3,
    "layer_types": [LINEAR, LINEAR, FULL], "max_position_embeddings": 512, "pad_token_id": 0,
}  # fmt: skip
MODELS: dict[str, tuple[str, list[str], dict[str, Any]]] = {
    "kimi_linear": ("KimiLinear", ["kda", "kda", "mla"], {
        "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "linear_num_heads": 4, "linear_head_dim": 128,
        "mlp_layer_types": ["dense"] * 3,
    }),
    "qwen3_next": ("Qwen3Next", ["gated_delta_rule"] * 2, {
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "mlp_only_layers": [0, 1, 2], "num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    }),
}  # fmt: skip
WRAPPED = {
    "kimi_linear": ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"),
    "qwen3_next": ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
}

LIFTED = {
    "kimi_linear": ("chunk_kda", "fused_recurrent_kda"),
    "qwen3_next": ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
}


def build(kind: str) -> Any:
    name, _, sizes = MODELS[kind]
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**BASE, **sizes))
    return model.to("cuda", torch.bfloat16).eval()


def prefilled(model: Any, tokens: Tensor) -> Any:
    """A static cache after a prompt, which runs eagerly."""
    cache = transformers.StaticCache(config=model.config, max_cache_len=TOKENS + 8)
    model(input_ids=tokens, past_key_values=cache, use_cache=True)
    return cache


def results(model: Any, forward: Callable[..., Any], tokens: Tensor) -> list[Tensor]:
    """Logits of a prompt, and those of one token after a prompt."""
    prompt = forward(input_ids=tokens, use_cache=False).logits
    cache = prefilled(model, tokens[:, :-1])
    position = torch.full((BATCH, 1), TOKENS - 1, device="cuda")
    options: dict[str, Any] = {"past_key_values": cache, "position_ids": position, "use_cache": True}
    return [prompt, forward(input_ids=tokens[:, -1:], **options).logits]


def without_fla(kind: str, tokens: Tensor, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """transformers' own functions, in fp32."""
    modeling = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    with monkeypatch.context() as patch:
        for name in WRAPPED[kind]:
            patch.setattr(modeling, name, getattr(modeling, name).__wrapped__)
        model = build(kind).float()
        return results(model, model, tokens)


def graphs(model: Any, tokens: Tensor) -> tuple[int, list[Tensor]]:
    """How many graphs Inductor alone makes of the model, and its results."""
    torch._dynamo.reset()
    counters.clear()
    found = results(model, torch.compile(model, backend="inductor"), tokens)
    return counters["stats"]["unique_graphs"], found


@pytest.fixture(autouse=True)
def captures_are_no_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before torch 2.12 Dynamo takes every capture for an export, and transformers calls its own functions in one."""
    monkeypatch.setattr("transformers.integrations.hub_kernels.is_torchdynamo_exporting", lambda: False)


@pytest.fixture(autouse=True)
def little_is_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """FLA compiles every configuration of its kernels to choose one, most of this test's time; any gives its numbers.

    Two are left, as the first may ask for more than a GPU has.
    """
    autotuner = importlib.import_module("triton.runtime.autotuner").Autotuner
    prune: Callable[..., list[Any]] = autotuner.prune_configs
    monkeypatch.setattr(autotuner, "prune_configs", lambda self, kwargs: prune(self, kwargs)[:2])


@pytest.mark.parametrize("kind", MODELS)
def test_one_graph_with_every_layer(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = torch.randint(3, 512, (BATCH, TOKENS), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    with torch.inference_mode():
        exact = without_fla(kind, tokens, monkeypatch)
        model = build(kind)
        eager = results(model, model, tokens)
        broken, alone = graphs(model, tokens)
        torch._dynamo.reset()
        with collecting() as report:
            ours = results(model, torch.compile(model, backend="kda", fullgraph=True), tokens)
        assert len(report.graphs) == 2
        assert all(match.lifted in LIFTED[kind] for match in report.matches if match.pattern != "mla")
        assert [match.pattern for match in report.matches] == MODELS[kind][1] * 2
        for have, theirs, want in zip(ours, eager, exact, strict=True):
            assert relative_error(have, want) <= 1.2 * relative_error(theirs, want)
        again, after = graphs(model, tokens)
    assert broken == again > 2
    assert all(torch.equal(x, y) for x, y in zip(alone, after, strict=True))


@pytest.mark.parametrize("name", ["chunk_kda", "chunk_gla"])
def test_training_under_autocast(name: str) -> None:
    """Projections in bfloat16, gates in float32, weights too."""
    fla_ops = importlib.import_module("fla.ops")
    heads, size = 4, 64
    torch.manual_seed(0)
    x = torch.randn(BATCH, TOKENS, 128, device="cuda")
    w_in = (torch.randn(4, heads * size, 128, device="cuda") * 0.1).requires_grad_()

    def model(x: Tensor, w_in: Tensor) -> Tensor:
        q, k, v, g = ((x @ w.mT).unflatten(-1, (heads, size)) for w in w_in)
        g = torch.nn.functional.logsigmoid(g.float())
        k = torch.nn.functional.normalize(k.float(), dim=-1).to(q.dtype)
        given = {} if name == "chunk_gla" else {"beta": q.float().mean(-1).sigmoid().to(q.dtype)}
        return getattr(fla_ops, name)(q, k, v, g=g, **given)[0]

    found: list[list[Tensor]] = []
    with collecting() as report:
        for run in (torch.compile(model, backend="kda", fullgraph=True), model):
            with torch.autocast("cuda", torch.bfloat16):
                out = run(x, w_in)
            found.append([out, *torch.autograd.grad(out.float().square().mean(), w_in)])
    assert [match.lifted for match in report.matches] == [name]
    assert found[0][0].dtype == found[1][0].dtype == torch.bfloat16
    assert max(map(relative_error, *found)) < 1e-2

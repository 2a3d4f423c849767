"""Small whole models of the CUDA suite: transformers' own, random weights, real head sizes, four layers."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kdacompile.bench import device_clock, rows
from kdacompile.bench.cuda_cases import Case
from kdacompile.report.collect import collecting

_LINEAR, _FULL = "linear_attention", "full_attention"
_PROMPT, _STEPS, _ROUNDS = 128, 48, 3  # of decoding
_BASE: dict[str, Any] = {
    "vocab_size": 32768, "num_hidden_layers": 4, "layer_types": [_LINEAR, _LINEAR, _LINEAR, _FULL],
    "max_position_embeddings": 8192, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# Feed-forward layers are dense: routers of experts cut the graph of some models, and are not what is measured.
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "kimi_linear": ("KimiLinear", {
        "hidden_size": 2304, "intermediate_size": 9216, "num_attention_heads": 32, "num_key_value_heads": 32,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "linear_num_heads": 32, "linear_head_dim": 128, "mlp_layer_types": ["dense"] * 4,
    }),
    "qwen3_next": ("Qwen3Next", {
        "hidden_size": 2048, "intermediate_size": 5120, "num_attention_heads": 16, "num_key_value_heads": 2,
        "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "mlp_only_layers": [0, 1, 2, 3], "num_experts": 2, "num_experts_per_tok": 2,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    }),
    "deepseek_v3": ("DeepseekV3", {
        "layer_types": None, "hidden_size": 7168, "intermediate_size": 18432, "num_attention_heads": 128,
        "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "first_k_dense_replace": 4,
    }),
}  # fmt: skip


def build(kind: str) -> Any:
    """The model in bf16 on the device."""
    transformers = importlib.import_module("transformers")
    name, sizes = _MODELS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**_BASE | sizes)
    with torch.device("cuda"):
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    return model.to(torch.bfloat16).eval()


class Contender:
    """A model under one of "eager", "inductor" or "ours", "+fla" with it importable, "-graphs" with CUDA graphs."""

    def __init__(self, case: Case, name: str) -> None:
        self._case, self._name = case, name

    def get_ready(self) -> None:
        """Build, compile, and run everything once."""
        self._model = build(self._case.kind)
        self._forward = self._compiled()
        vocabulary = self._model.config.vocab_size
        self._tokens = torch.randint(3, vocabulary, (self._case.batch, self._case.length), device="cuda")
        with torch.inference_mode(), collecting() as report:
            self._first = device_clock.seconds_until_done(self._once)
        self._report = report

    def _compiled(self) -> Any:
        backend = self._name.removesuffix("+fla").removesuffix("-graphs")
        if backend == "eager":
            return self._model
        options: dict[str, Any] = {"mode": "reduce-overhead"} if self._name.endswith("-graphs") else {}
        options |= {"fullgraph": True} if self._name == "ours+fla" else {}
        return torch.compile(self._model, backend="kda" if backend == "ours" else "inductor", **options)

    @property
    def _prefills(self) -> bool:
        """Inductor unrolls a prompt's loop over chunks, layer by layer, for tens of minutes: it only decodes."""
        return not self._name.startswith("inductor")

    def _once(self) -> None:
        if self._prefills:
            self._prefill()
        self._decode(3)

    def _prefill(self) -> Tensor:
        return self._forward(input_ids=self._tokens, use_cache=False, logits_to_keep=1).logits

    def _decode(
        self, steps: int, clock: Callable[[Callable[[], object]], float] = device_clock.seconds_until_done
    ) -> float:
        """The median step after a short prompt, by ``clock``. The prompt runs eagerly: it is the same for all."""
        transformers = importlib.import_module("transformers")
        cache = transformers.StaticCache(config=self._model.config, max_cache_len=_PROMPT + _STEPS + 8)
        self._model(input_ids=self._tokens[:, :_PROMPT], past_key_values=cache, use_cache=True)
        times: list[float] = []
        for step in range(steps):
            torch.compiler.cudagraph_mark_step_begin()
            position = torch.full((self._case.batch, 1), _PROMPT + step, device="cuda")
            token = self._tokens[:, _PROMPT + step : _PROMPT + step + 1]
            torch.cuda.synchronize()

            def one(token: Tensor = token, position: Tensor = position) -> None:
                self._forward(input_ids=token, past_key_values=cache, position_ids=position, use_cache=True)

            times.append(clock(one))
        return statistics.median(times)

    def measure(self) -> dict[str, Any]:
        figures: dict[str, Any] = {"first_call_seconds": self._first}
        with torch.inference_mode():
            # Rounds differ by a third with what else the host does: the fastest says what the contender takes.
            figures["decode_ms"] = 1e3 * min(
                self._decode(_STEPS, device_clock.seconds_until_done) for _ in range(_ROUNDS)
            )
            figures["decode_device_us"] = self._decode(_STEPS, device_clock.enqueued_microseconds)
            if self._prefills:
                seconds = statistics.median(device_clock.seconds_until_done(self._timed_prefill) for _ in range(7))
                figures["prefill_tokens_a_second"] = self._tokens.numel() / seconds
                figures["error"] = self._error()
        if self._name.startswith("ours"):
            figures |= {"graphs": len(self._report.graphs), "matches": len(self._report.matches)}
        return figures

    def _timed_prefill(self) -> None:
        torch.compiler.cudagraph_mark_step_begin()
        self._prefill()

    def _error(self) -> float:
        """Of the last prompt token's logits, against the same model run eagerly here."""
        torch.compiler.cudagraph_mark_step_begin()
        logits = self._prefill().double()
        expected = self._model(input_ids=self._tokens, use_cache=False, logits_to_keep=1).logits.double()
        return rows.relative_error(logits, expected)

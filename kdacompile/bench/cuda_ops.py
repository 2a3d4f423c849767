"""One call of the CUDA suite: its inputs, what it should give, and the contenders."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from kdacompile.bench.cuda_cases import Case
from kdacompile.patterns.recurrence.definition import token_recurrence

_EPS = 1e-6
_BOUND = -5.0  # of the log gate of kda
_CHECKED = 2048  # tokens of the numerical check: the fp64 recurrence goes token by token
_FUNCTIONS = {
    "kda": ("transformers.models.kimi_linear.modeling_kimi_linear", "chunk_kimi_delta_attention"),
    "gdn": ("transformers.models.qwen3_next.modeling_qwen3_next", "torch_chunk_gated_delta_rule"),
    "step": ("transformers.models.kimi_linear.modeling_kimi_linear", "recurrent_kimi_delta_attention"),
}
UNBOUNDED = ("softplus", "packed")  # kinds of kda with Kimi Linear's gate
Output = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Inputs:
    """q, k, v, the gate and beta in bf16 (kda: before their activations), A_log and dt_bias in fp32, the state."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor
    dt_bias: Tensor
    state: Tensor | None
    cu_seqlens: Tensor | None = None

    @classmethod
    def random(cls, case: Case) -> Inputs:
        generator = torch.Generator("cuda").manual_seed(0)
        keys = (case.batch, case.length, case.heads, case.width)
        values = (case.batch, case.length, case.value_heads, case.width)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device="cuda")

        q, k, v = (normal(*shape).bfloat16() for shape in (keys, keys, values))
        beta = normal(*values[:3]).bfloat16()
        state = normal(case.batch, case.value_heads, case.width, case.width) if case.kind == "step" else None
        A_log, dt_bias = 0.5 * normal(case.value_heads), normal(case.value_heads, case.width) - 2.0
        if case.kind == "gdn":
            gate = -A_log.exp() * torch.nn.functional.softplus(normal(*values[:3]) - 2.0)
            return cls(q, k, v, gate, beta.float().sigmoid().bfloat16(), A_log, dt_bias, state)
        bounds = _bounds(case.length) if case.kind == "packed" else None
        return cls(q, k, v, normal(*values).bfloat16(), beta, A_log, dt_bias, state, bounds)

    def tokens(self, start: int, end: int) -> Inputs:
        """Some tokens, as one sequence."""
        some = {name: getattr(self, name)[:, start:end] for name in ("q", "k", "v", "g", "beta")}
        return replace(self, **some, cu_seqlens=None)

    def head(self, tokens: int) -> Inputs:
        """The first tokens."""
        first = self.tokens(0, tokens)
        if self.cu_seqlens is None:
            return first
        bounds = [bound for bound in self.cu_seqlens.tolist() if bound < tokens]
        return replace(first, cu_seqlens=torch.tensor([*bounds, tokens], device="cuda"))

    @property
    def sequences(self) -> int:
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def bytes(self) -> int:
        tensors = (self.q, self.k, self.v, self.g, self.beta, self.A_log, self.dt_bias, self.state)
        return sum(x.nbytes for x in tensors if x is not None)


def _bounds(length: int) -> Tensor:
    """Sixteen sequences, the longest sixteen times as long as the shortest."""
    ends = accumulate(range(1, 17))
    return torch.tensor([0, *(length * end // 136 for end in ends)], device="cuda")


def log_gate(inputs: Inputs, kind: str) -> Tensor:
    if kind == "gdn":
        return inputs.g
    if kind in UNBOUNDED:
        return -inputs.A_log.exp()[:, None] * torch.nn.functional.softplus(inputs.g + inputs.dt_bias)
    return _BOUND * torch.sigmoid(inputs.A_log.exp()[:, None] * (inputs.g + inputs.dt_bias))


def oracle(inputs: Inputs, kind: str) -> Output:
    """The recurrence in fp64."""
    if inputs.cu_seqlens is not None:
        parts = [oracle(inputs.tokens(start, end), kind) for start, end in pairwise(inputs.cu_seqlens.tolist())]
        return torch.cat([o for o, _ in parts], 1), torch.cat([state for _, state in parts])
    tensors = {name: x for name, x in vars(inputs).items() if x is not None}
    double = replace(inputs, **{name: x.double() for name, x in tensors.items()})
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS) for x in (double.q, double.k))
    decay = log_gate(double, kind).exp()
    beta = double.beta if kind == "gdn" else double.beta.sigmoid()
    decay = decay if decay.dim() == 4 else decay.unsqueeze(-1)
    return token_recurrence(q, k, double.v, decay, beta, double.state, delta=True, scale=q.shape[-1] ** -0.5)


def contender_call(contender: str, kind: str, inputs: Inputs) -> Callable[[], Output]:
    """The contender as a call without arguments."""
    if contender == "ours":
        return _ours(kind, inputs)
    if contender == "portable":
        return _portable(kind, inputs)
    if contender == "fla":
        return _fla(kind, inputs)
    module, name = _FUNCTIONS[kind]
    plain: Callable[..., Output] = getattr(importlib.import_module(module), name)

    def function(x: Inputs) -> Output:
        beta = x.beta if kind == "gdn" else x.beta.sigmoid()
        options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
        return plain(x.q, x.k, x.v, g=log_gate(x, kind), beta=beta, initial_state=x.state, **options)

    compiled = torch.compile(function, backend=contender)
    return lambda: compiled(inputs)


def _ours(kind: str, x: Inputs) -> Callable[[], Output]:
    from kdacompile import ops

    options: dict[str, Any] = {"qk_l2norm": _EPS}
    if kind != "gdn":
        options |= {"gate_fn": "softplus"} if kind in UNBOUNDED else {"gate_fn": "sigmoid", "gate_scale": _BOUND}
        options |= {"A_log": x.A_log, "dt_bias": x.dt_bias, "sigmoid_beta": True, "cu_seqlens": x.cu_seqlens}
    if kind == "step":
        options.pop("cu_seqlens")
        return lambda: ops.linear_attention_step(x.q, x.k, x.v, x.g, x.beta, state=x.state, inplace=True, **options)

    def run() -> Output:
        o, state = ops.linear_attention(x.q, x.k, x.v, x.g, x.beta, output_final_state=True, **options)
        assert state is not None  # asked for
        return o, state

    return run


def _portable(kind: str, x: Inputs) -> Callable[[], Output]:
    from kdacompile.lowering.calls import Call
    from kdacompile.lowering.triton import TritonKernels

    gdn = kind == "gdn"
    gate_fn = "log" if gdn else "softplus" if kind in UNBOUNDED else "sigmoid"
    call = Call(
        x.q, x.k, x.v, x.g, x.beta, x.state, None if gdn else x.A_log, None if gdn else x.dt_bias, x.cu_seqlens,
        scale=x.q.shape[-1] ** -0.5, delta=True, gate="token" if gdn else "channel", gate_fn=gate_fn, gate_scale=_BOUND,
        sigmoid_beta=not gdn, qk_l2norm_eps=_EPS, chunk_size=0, out_dtype=x.v.dtype,
    )  # fmt: skip
    kernels = TritonKernels()
    return (lambda: kernels.step(call, x.state)) if kind == "step" else (lambda: kernels.run(call))


def _fla(kind: str, x: Inputs) -> Callable[[], Output]:
    options: dict[str, Any] = {"output_final_state": True, "use_qk_l2norm_in_kernel": True, "initial_state": x.state}
    if kind == "gdn":
        function = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
        return lambda: function(x.q, x.k, x.v, x.g, x.beta, **options)
    module = importlib.import_module("fla.ops.kda")
    function = module.fused_recurrent_kda if kind == "step" else module.chunk_kda
    options |= {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    options |= {"A_log": x.A_log, "dt_bias": x.dt_bias.flatten()}
    options |= {} if kind in UNBOUNDED else {"lower_bound": _BOUND}
    options |= {"safe_gate": True} if kind in ("kda", "train") else {}
    options |= {} if kind == "step" else {"cu_seqlens": x.cu_seqlens}
    return lambda: function(x.q, x.k, x.v, x.g, x.beta, **options)


# ---- training


def training_call(contender: str, inputs: Inputs) -> Callable[[], tuple[Tensor, ...]]:
    """Forward and backward: o, and the gradients of everything that can have one."""
    leaves = _leaves(inputs)
    forward = contender_call(contender, "train", leaves)
    grad = _cotangent(inputs)

    def run() -> tuple[Tensor, ...]:
        o, _ = forward()
        return (o, *torch.autograd.grad(o, _trained(leaves), grad))

    return run


def training_oracle(inputs: Inputs) -> tuple[Tensor, ...]:
    """The same through autograd of the recurrence in fp64."""
    leaves = _leaves(inputs, torch.float64)  # or autograd would round their gradients
    o, _ = oracle(leaves, "train")
    return (o, *torch.autograd.grad(o, _trained(leaves), _cotangent(inputs).double()))


def saved_bytes(contender: str, inputs: Inputs) -> int:
    """What is kept from the forward pass for the backward one, inputs included."""
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        o, _ = contender_call(contender, "train", _leaves(inputs))()
    del o
    return sum(kept.values())


def _trained(x: Inputs) -> tuple[Tensor, ...]:
    return (x.q, x.k, x.v, x.g, x.beta, x.A_log, x.dt_bias)


def _leaves(inputs: Inputs, dtype: torch.dtype | None = None) -> Inputs:
    names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")
    copies = {name: getattr(inputs, name).detach().to(dtype, copy=True).requires_grad_() for name in names}
    return replace(inputs, **copies)


def _cotangent(inputs: Inputs) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(1)
    return torch.randn(inputs.v.shape, generator=generator, device="cuda").to(inputs.v.dtype)

"""The gated delta rule operators of torch_npu, where they lose nothing against the emitted kernels.

Both keep the state in bf16, transposed ([V, K]), and take q, k, v and beta in bf16 and one gate a token; their gate per
channel (``gk``) is documented as not supported. So they serve a caller who holds the state in bf16 himself: rounding it
once more is then what he asked for. Everybody else gets a state that stays in fp32. Their documentation names the A2
and A3 (910B, 910C) and no later device. It also has the chunked one take at most 8 tokens a sequence, as the recurrent
one does, but shows it with 100 and as the one for prefill: taken for a slip.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..calls import Call
from ..scratch import Scratch
from .emit import FIRST
from .launch import target_of_arch
from .prepare import prepare

CHUNKED = (
    "npu_chunk_gated_delta_rule(Tensor query, Tensor key, Tensor value, *, Tensor? beta=None, "
    "Tensor? initial_state=None, Tensor? actual_seq_lengths=None, float? scale=None, Tensor? g=None) "
    "-> (Tensor, Tensor)"
)
RECURRENT = (
    "npu_recurrent_gated_delta_rule(Tensor query, Tensor key, Tensor value, Tensor(a!) state, *, Tensor? beta=None, "
    "float? scale=None, Tensor? actual_seq_lengths=None, Tensor? ssm_state_indices=None, "
    "Tensor? num_accepted_tokens=None, Tensor? g=None, Tensor? gk=None) -> Tensor"
)
_MOST_HEADS, _WIDTH = 64, 128  # of the chunked operator
_MOST_STEP_HEADS = _MOST_STEP_WIDTH = 256  # of the recurrent one


class GatedDeltaRuleOperators:
    """:class:`kdacompile.lowering.calls.Implementation`.

    ``namespace`` stands in for what holds the operators (``torch.ops.npu``), ``device`` for the name of the current
    device.
    """

    name = "torch_npu"

    def __init__(self, namespace: Any = None, device: str = "") -> None:
        self._namespace, self._device = namespace, device

    def declines(self, call: Call) -> str | None:
        """Whole sequences and steps have an operator each; a call with one token a sequence is a step."""
        return self._declines_row(call) or (_declines_step(call) if _is_step(call) else _declines_sequence(call))

    def run(self, call: Call, scratch: Scratch | None = None) -> tuple[Tensor, Tensor]:
        call = prepare(call)
        assert call.initial_state is not None and call.g is not None and call.beta is not None
        length, value_heads = call.q.shape[0] * call.q.shape[1], call.v.shape[2]
        if call.cu_seqlens is None:
            lengths = torch.full((call.sequences,), call.q.shape[1], dtype=torch.int32, device=call.q.device)
        else:
            lengths = call.cu_seqlens.diff().to(torch.int32)
        o, state = self._operator(CHUNKED)(
            call.q.reshape(length, *call.q.shape[2:]),
            call.k.reshape(length, *call.k.shape[2:]),
            call.v.reshape(length, *call.v.shape[2:]),
            beta=call.beta.reshape(length, value_heads),
            initial_state=call.initial_state.mT.contiguous().clone(),
            actual_seq_lengths=lengths,
            scale=call.scale,
            g=call.g.reshape(length, value_heads).float(),
        )
        return o.view(call.v.shape).to(call.out_dtype), state.mT.float().contiguous()

    def step(self, call: Call, state: Tensor | None, scratch: Scratch | None = None) -> tuple[Tensor, Tensor]:
        call = prepare(call)
        assert call.initial_state is not None and call.g is not None and call.beta is not None
        target = call.initial_state.mT.contiguous().clone() if state is None else state.mT
        batch = call.q.shape[0]
        each = torch.arange(batch, dtype=torch.int32, device=call.q.device)
        o = self._operator(RECURRENT)(
            call.q.squeeze(1).contiguous(),
            call.k.squeeze(1).contiguous(),
            call.v.squeeze(1).contiguous(),
            target,
            beta=call.beta.squeeze(1).contiguous(),
            scale=call.scale,
            actual_seq_lengths=torch.ones_like(each),
            ssm_state_indices=each,
            g=call.g.squeeze(1).float().contiguous(),
        )
        o = o.unsqueeze(1).to(call.out_dtype)
        return (o, target.mT.float().contiguous()) if state is None else (o, state)

    def _operator(self, schema: str) -> Any:
        return getattr(self._namespace or torch.ops.npu, schema.split("(")[0])

    def _declines_row(self, call: Call) -> str | None:
        if not call.delta or call.gate != "token" or call.beta is None:
            return "not the gated delta rule with one gate a token"
        if any(x.dtype is not torch.bfloat16 for x in (call.q, call.k, call.v, call.beta)) or call.sigmoid_beta:
            return "q, k, v and beta are not all given in bfloat16"
        if call.state_indices is not None:
            return "the states lie in a pool"
        if call.initial_state is None or call.initial_state.dtype is not torch.bfloat16:
            return "the state is not held in bfloat16"
        if not all(hasattr(self._namespace or torch.ops.npu, s.split("(")[0]) for s in (CHUNKED, RECURRENT)):
            return "this torch_npu does not have the operators"
        if target_of_arch(self._device or _device_name()) != FIRST:
            return "documented for the A2 and A3 alone"
        return None


def _device_name() -> str:
    npu: Any = getattr(torch, "npu", None)
    return "" if npu is None else str(npu.get_device_name())


def _is_step(call: Call) -> bool:
    return call.q.shape[1] == 1 and call.cu_seqlens is None


def _declines_step(call: Call) -> str | None:
    assert call.initial_state is not None
    if max(call.q.shape[2], call.v.shape[2]) > _MOST_STEP_HEADS:
        return f"more than {_MOST_STEP_HEADS} heads"
    if max(call.q.shape[3], call.v.shape[3]) > _MOST_STEP_WIDTH:
        return f"K or V above {_MOST_STEP_WIDTH}"
    if not call.initial_state.mT.is_contiguous():
        return "the state does not lie in memory as [B, HV, V, K]"
    return None


def _declines_sequence(call: Call) -> str | None:
    if max(call.q.shape[2], call.v.shape[2]) > _MOST_HEADS:
        return f"more than {_MOST_HEADS} heads"
    if call.q.shape[3] != _WIDTH or call.v.shape[3] != _WIDTH:
        return f"K and V are not both {_WIDTH}"
    return None

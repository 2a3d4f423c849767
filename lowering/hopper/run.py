"""Which calls the Hopper kernels take."""

# pyright: reportMissingImports=false

from __future__ import annotations

from functools import cache

import torch
from packaging.version import Version
from torch import Tensor

from ..ahead import compile_ahead
from ..calls import Call
from ..gates import GATE_FUNCTIONS
from ..scratch import Scratch
from ..triton.configs import triton_version
from .launches import launches, scheduled
from .schedules import CHUNK, WIDTHS, tile_rows

TRITON = ("3.6", "3.7")  # from, below: whose numbers were checked on a GPU (3.7.1 compiles these kernels as well)
MIN_CHUNKS = 2  # one chunk is one step of a scan: left to the emitted kernels
MIN_KEYS = 32  # narrower heads would compute mostly padding, in chunks too long for what bf16 keeps of them


class HopperKernels:
    """:class:`kdacompile.lowering.calls.Implementation`: the family in bf16, K from 32 to 128, sm_90."""

    name = "hopper"

    def declines(self, call: Call) -> str | None:
        return machine(call.q) or _row(call) or _tensors(call)

    def run(self, call: Call, scratch: Scratch | None = None) -> tuple[Tensor, Tensor]:
        scratch = scratch or Scratch()
        with torch.cuda.device(call.q.device):
            plan = scheduled(call)
            compile_ahead(lambda ahead: launches(call, plan, ahead).run(), scratch)
            return launches(call, plan, scratch).run()

    def step(self, call: Call, state: Tensor | None, scratch: Scratch | None = None) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("one token is declined: the emitted kernel takes it")


def machine(x: Tensor) -> str | None:
    return _machine(x.device) if x.is_cuda else "not a Hopper GPU"


@cache
def _machine(device: torch.device) -> str | None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability(device) != (9, 0):
        return "not a Hopper GPU"
    found = triton_version()
    if found is None or not Version(TRITON[0]) <= found < Version(TRITON[1]):
        return f"needs triton >= {TRITON[0]}, < {TRITON[1]}; found {found}"
    return None


def _row(call: Call) -> str | None:
    """Whether these kernels compute this row of the family."""
    if call.g is not None and call.gate_fn not in GATE_FUNCTIONS:
        return f"no kernels with the gate function {call.gate_fn!r}"
    return None


def _tensors(call: Call) -> str | None:
    """Whether these kernels take tensors of these dtypes and sizes."""
    key_width, value_width = call.q.shape[3], call.v.shape[3]
    if not MIN_KEYS <= key_width <= WIDTHS[-1] or key_width % 8 or value_width % 8:
        return f"K from {MIN_KEYS} to {WIDTHS[-1]}, K and V in steps of 8 only"
    if {call.q.dtype, call.k.dtype, call.v.dtype, call.out_dtype} != {torch.bfloat16}:
        return "q, k, v and o must be bfloat16"
    if call.g is not None and call.gate == "channel" and call.g.dtype not in (torch.bfloat16, torch.float32):
        return "a gate per channel must be bfloat16 or float32"  # it goes through the copy engine as it is
    if call.v.shape[1] < MIN_CHUNKS * CHUNK:
        return "a short sequence"
    sequence_heads, chunks = call.sequences * call.v.shape[2], -(-call.v.shape[1] // CHUNK)
    if sequence_heads * chunks * tile_rows("channel", WIDTHS[0]) >= 2**31 or sequence_heads >= 2**16:
        return "too many tokens for 32-bit coordinates"
    return None

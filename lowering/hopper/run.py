"""Launching the Hopper kernels: which calls they take, their schedule, and the two kernels of a call."""

# pyright: reportMissingImports=false

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from ..calls import Call
from ..scratch import Scratch

CHUNK = 64
WIDTH = 128
BUFFER_ROWS = 256  # of WIDTH bf16 that a chunk leaves behind between the kernels
TRITON = ("3.6", "3.7")  # from, below: whose numbers were checked on a GPU (3.7.1 compiles these kernels as well)
MAX_SHIFT = 122  # 2^122 times a unit key is finite in bf16, and 2^-122 is normal
MIN_CHUNKS = 2  # one chunk is one step of a scan: left to the emitted kernels
SCRATCH_LIMIT = 2**30  # bytes between the kernels, unless one chunk of all heads takes more
GRAM_REGISTERS = 200  # a thread of the gram warps; the row warps share what is left
_CHUNK_BYTES = BUFFER_ROWS * WIDTH * 2 + WIDTH * 4  # bf16 rows and an fp32 decay
LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Schedule:
    """How a call is cut: runs of ``segment`` chunks share one buffer, a block of the scan has ``columns`` of V."""

    chunks: int
    segment: int
    columns: int

    @property
    def spans(self) -> list[tuple[int, int]]:
        """First chunk and number of chunks of every run."""
        return [(first, min(self.segment, self.chunks - first)) for first in range(0, self.chunks, self.segment)]

    def scratch_bytes(self, lanes: int) -> int:
        """What a call with ``lanes`` = B * HV allocates between its kernels."""
        return lanes * self.segment * _CHUNK_BYTES


def schedule(lanes: int, length: int, multiprocessors: int) -> Schedule:
    """The schedule of ``lanes`` = B * HV heads of ``length`` tokens on a GPU with so many multiprocessors.

    The scan's steps depend on each other, and a block fills a multiprocessor: half the columns a block while that
    still lets every block run at once.
    """
    chunks = -(-length // CHUNK)
    columns = 64 if 2 * lanes <= multiprocessors else 128
    return Schedule(chunks, min(chunks, max(1, SCRATCH_LIMIT // (lanes * _CHUNK_BYTES))), columns)


class HopperKernels:
    """:class:`kdacompile.lowering.calls.Implementation`: bounded KDA and gated delta rule, K = V = 128, sm_90."""

    name = "hopper"

    def declines(self, call: Call) -> str | None:
        return machine(call.q) or _row(call) or _tensors(call)

    def run(self, call: Call, scratch: Scratch | None = None) -> tuple[Tensor, Tensor]:
        lanes = call.v.shape[0] * call.v.shape[2]
        plan = schedule(lanes, call.v.shape[1], _multiprocessors(call.q.device))
        with torch.cuda.device(call.q.device):
            return _Launches(call, plan, scratch or Scratch()).run()

    def step(self, call: Call, state: Tensor | None) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("one token is declined: the emitted kernel takes it")


def machine(x: Tensor) -> str | None:
    if not x.is_cuda or torch.cuda.get_device_capability(x.device) != (9, 0):
        return "not a Hopper GPU"
    found = _triton_version()
    if found is None or not Version(TRITON[0]) <= found < Version(TRITON[1]):
        return f"needs triton >= {TRITON[0]}, < {TRITON[1]}; found {found}"
    return None


def _row(call: Call) -> str | None:
    """Whether these kernels compute this row of the family."""
    if not call.delta or call.gate not in ("channel", "token"):
        return "only the delta rule with a gate per channel or per token"
    if call.gate == "channel" and (call.gate_fn != "sigmoid" or _shift(call.gate_scale) > MAX_SHIFT):
        return f"gates per channel are not bounded below by {-MAX_SHIFT / (16 * LOG2E):.2f}"
    if call.gate == "token" and call.gate_fn not in ("log", "softplus"):
        return f"a {call.gate_fn} gate per token"
    if not call.qk_l2norm_eps:
        return "keys are not known to be unit vectors: the inverse in fp16 could overflow"
    if call.cu_seqlens is not None:
        return "packed sequences"
    return None


def _tensors(call: Call) -> str | None:
    """Whether these kernels take tensors of these dtypes and sizes."""
    batch, length, _, key_width = call.q.shape
    value_heads, value_width = call.v.shape[2:]
    if (key_width, value_width) != (WIDTH, WIDTH):
        return f"K = V = {WIDTH} only"
    dtypes = {call.q.dtype, call.k.dtype, call.v.dtype, call.out_dtype}
    if call.g is not None and call.gate == "channel":
        dtypes.add(call.g.dtype)  # it goes through the copy engine; a gate per token is loaded in any dtype
    if dtypes != {torch.bfloat16}:
        return "q, k, v, o and a gate per channel must be bfloat16"
    if length < MIN_CHUNKS * CHUNK:
        return "a short sequence"
    if batch * value_heads * -(-length // CHUNK) * BUFFER_ROWS >= 2**31 or batch * value_heads >= 2**16:
        return "too many tokens for 32-bit coordinates"
    return None


class _Launches:
    """The kernels of one call, and what they need in common."""

    def __init__(self, call: Call, plan: Schedule, scratch: Scratch) -> None:
        from . import prepare, prepare_scalar, scan  # here, not above: a machine without triton imports this module too

        self.prepare, self.prepare_scalar, self.scan = prepare, prepare_scalar, scan
        self.call, self.plan = call, plan
        self.batch, self.length, self.value_heads = call.v.shape[:3]
        self.lanes = self.batch * self.value_heads
        device = call.q.device
        tiles = self.lanes * plan.segment
        self.rows = scratch.empty((tiles * BUFFER_ROWS, WIDTH), torch.bfloat16, device)
        self.decays = scratch.empty((tiles, WIDTH), torch.float32, device)
        self.o = torch.empty(call.v.shape, dtype=call.out_dtype, device=device)
        self.final = torch.empty((*call.v.shape[::2], WIDTH, WIDTH), dtype=torch.float32, device=device)
        self.blocks = _multiprocessors(device)
        tile = (1, CHUNK, 1, WIDTH)
        self.q, self.k = (described(_addressed(x), tile) for x in (call.q, call.k))
        columns = (1, CHUNK, 1, plan.columns)
        self.v, self.o_out = described(_addressed(call.v), columns), described(self.o, columns)

    def run(self) -> tuple[Tensor, Tensor]:
        for first, chunks in self.plan.spans:
            self.launch_prepare(first, chunks)
            self.launch_scan(first, chunks)
        return self.o, self.final

    def launch_prepare(self, first: int, chunks: int) -> None:
        call = self.call
        total = self.lanes * chunks
        # What is absent is never read: any tensor will do for its pointer.
        A_log = self.decays if call.A_log is None else call.A_log.contiguous()
        dt_bias = self.decays if call.dt_bias is None else call.dt_bias.contiguous()
        beta = self.decays if call.beta is None else call.beta
        parameters = (A_log, dt_bias, beta, *((0, 0, 0) if call.beta is None else call.beta.stride()))
        out = (self.rows, described(self.rows, (CHUNK, CHUNK)), self.decays)
        group = self.value_heads // call.q.shape[2]
        common = (self.length, self.value_heads, group, first, chunks, total, call.scale, call.qk_l2norm_eps)
        given = {
            "HAS_A": call.A_log is not None, "HAS_DT": call.dt_bias is not None, "HAS_BETA": call.beta is not None,
            "SIGMOID_BETA": call.sigmoid_beta and call.beta is not None,
            "GRAM_REGISTERS": GRAM_REGISTERS, "num_warps": 8,
        }  # fmt: skip
        grid, g = (min(self.blocks, total),), _present(call.g)
        if call.gate == "token":
            softplus = call.gate_fn == "softplus"
            self.prepare_scalar.prepare_scalar[grid](
                self.q, self.k, g, *g.stride(), *parameters, *out, *common, SOFTPLUS=softplus, **given
            )
            return
        shift = _shift(call.gate_scale)
        bounds = (call.gate_scale * LOG2E, float(shift), 2.0**-shift)
        d_g = described(_addressed(g), (1, CHUNK, 1, WIDTH))
        self.prepare.prepare[grid](self.q, self.k, d_g, *parameters, *out, *common, *bounds, **given)

    def launch_scan(self, first: int, chunks: int) -> None:
        initial = self.call.initial_state if first == 0 else self.final
        strides = (0, 0, 0, 0) if initial is None else initial.stride()
        columns = self.plan.columns
        self.scan.scan[(WIDTH // columns, self.lanes)](
            described(self.rows, (BUFFER_ROWS, WIDTH)), self.v, self.decays, self.o_out,
            self.final if initial is None else initial, *strides, self.final, self.value_heads, first, chunks,
            BV=columns, STAGES=3 if columns == 64 else 2, HAS_INITIAL=initial is not None, num_warps=columns // 16,
        )  # fmt: skip


def _shift(gate_scale: float) -> int:
    """Half of the binary orders of magnitude that 32 tokens of the strongest gate span, rounded up."""
    return math.ceil(16 * -gate_scale * LOG2E)


def _present(x: Tensor | None) -> Tensor:
    assert x is not None
    return x


def aligned(x: Tensor) -> bool:
    """Whether the copy engine can address x: rows that lie together, everything else in steps of 16 bytes."""
    steps = [s for n, s in zip(x.shape[:-1], x.stride(), strict=False) if n > 1]
    return x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(s > 0 and s * x.element_size() % 16 == 0 for s in steps)


def _addressed(x: Tensor) -> Tensor:
    """x, or a copy of it that the copy engine can address."""
    return x if aligned(x) else x.clone(memory_format=torch.contiguous_format)


def described(x: Tensor, block: tuple[int, ...]) -> Any:
    """A descriptor for the copy engine; the stride of a dimension of size 1 is free, and made a legal one."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    strides = [s if n > 1 else WIDTH for n, s in zip(x.shape[:-1], x.stride(), strict=False)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], list(block), NVMMASharedLayout(128, 16, x.dim()))


@cache
def _triton_version() -> Version | None:
    try:
        return Version(version("triton"))
    except PackageNotFoundError:
        return None


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count

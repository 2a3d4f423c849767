"""Launching the Hopper kernels: which calls they take, and the kernels of a call."""

# pyright: reportMissingImports=false

from __future__ import annotations

import math
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from ..calls import Call
from ..gates import GATE_FUNCTIONS
from ..scratch import Scratch
from .schedules import CHUNK, WIDTHS, Schedule, padded, schedule, tile_factors, tile_rows

TRITON = ("3.6", "3.7")  # from, below: whose numbers were checked on a GPU (3.7.1 compiles these kernels as well)
MAX_SHIFT = 122  # 2^122 times a unit key is finite in bf16, and 2^-122 is normal
MIN_CHUNKS = 2  # one chunk is one step of a scan: left to the emitted kernels
COMBINED = 16  # columns of V whose state a block carries from segment to segment
MIN_KEYS = 32  # narrower heads would compute mostly padding, in chunks too long for what bf16 keeps of them
GRAM_REGISTERS = {64: 248, 128: 200}  # a thread of the gram warps, by width; the row warps share what is left
# Of a tile in a block of a prepare kernel, by the padded K, on an H200.
TILE_MICROSECONDS = {
    64: {"bounded": 4.1, "unbounded": 5.2, "token": 3.3},
    128: {"bounded": 6.0, "unbounded": 10.6, "token": 4.15},
}
LOG2E = math.log2(math.e)


class HopperKernels:
    """:class:`kdacompile.lowering.calls.Implementation`: KDA and the gated delta rule in bf16, K up to 128, sm_90."""

    name = "hopper"

    def declines(self, call: Call) -> str | None:
        return machine(call.q) or _row(call) or _tensors(call)

    def run(self, call: Call, scratch: Scratch | None = None) -> tuple[Tensor, Tensor]:
        with torch.cuda.device(call.q.device):
            return _Launches(call, _schedule(call), scratch or Scratch()).run()

    def step(self, call: Call, state: Tensor | None, scratch: Scratch | None = None) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("one token is declined: the emitted kernel takes it")


def _schedule(call: Call) -> Schedule:
    batch, length, heads, width = call.v.shape
    packed = None if call.cu_seqlens is None else call.sequences
    keys = padded(call.q.shape[3])
    return schedule(
        batch, length, heads, width, _multiprocessors(call.q.device), packed=packed, width=keys, gate=call.gate,
        tile_microseconds=TILE_MICROSECONDS[keys][_kind(call)],
    )  # fmt: skip


def machine(x: Tensor) -> str | None:
    return _machine(x.device) if x.is_cuda else "not a Hopper GPU"


@cache
def _machine(device: torch.device) -> str | None:
    if torch.cuda.get_device_capability(device) != (9, 0):
        return "not a Hopper GPU"
    found = _triton_version()
    if found is None or not Version(TRITON[0]) <= found < Version(TRITON[1]):
        return f"needs triton >= {TRITON[0]}, < {TRITON[1]}; found {found}"
    return None


def _row(call: Call) -> str | None:
    """Whether these kernels compute this row of the family."""
    if not call.delta or call.gate not in ("channel", "token"):
        return "only the delta rule with a gate per channel or per token"
    if call.gate_fn not in GATE_FUNCTIONS:
        return f"no kernels with the gate function {call.gate_fn!r}"
    if not call.qk_l2norm_eps:
        return "keys are not known to be unit vectors: the inverse in fp16 could overflow"
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
    lanes, chunks = call.sequences * call.v.shape[2], -(-call.v.shape[1] // CHUNK)
    if lanes * chunks * tile_rows("channel", WIDTHS[0]) >= 2**31 or lanes >= 2**16:
        return "too many tokens for 32-bit coordinates"
    return None


class _Launches:
    """The kernels of one call, and what they need in common."""

    def __init__(self, call: Call, plan: Schedule, scratch: Scratch) -> None:
        # Here, not above: a machine without triton imports this module too.
        from . import combine, prepare, prepare_scalar, prepare_unbounded, scan

        self.scan: Any = scan.scan
        self.combine: Any = combine.combine
        self.bounded: Any = prepare.prepare
        self.unbounded: Any = prepare_unbounded.prepare_unbounded
        self.scalar: Any = prepare_scalar.prepare_scalar
        self.call, self.plan, self.scratch = call, plan, scratch
        self.length, self.value_heads, self.value_width = call.v.shape[1:]
        self.key_width = call.q.shape[3]
        self.lanes = call.sequences * self.value_heads
        device = call.q.device
        rows, self.line = tile_rows(plan.gate, plan.width), tile_factors(plan.gate, plan.width)
        self.rows = scratch.empty((plan.buffers, plan.tiles * rows, plan.width), torch.bfloat16, device)
        self.factors = scratch.empty((plan.buffers, plan.tiles * self.line), torch.float32, device)
        self.o = scratch.result(tuple(call.v.shape), call.out_dtype, device)
        state = (call.sequences, self.value_heads, self.key_width, self.value_width)
        self.final = scratch.result(state, torch.float32, device)
        if plan.segments > 1:
            self.ends, self.states = (scratch.empty(shape, torch.float32, device) for shape in plan.segment_buffers)
        tile = (1, CHUNK, 1, plan.width)
        self.q, self.k = (described(_addressed(x, scratch), tile) for x in (call.q, call.k))
        assert call.g is not None
        self.g = call.g if call.gate == "token" else described(_addressed(call.g, scratch), tile)
        columns = (1, CHUNK, 1, plan.columns)
        self.v, self.o_out = described(_addressed(call.v, scratch), columns), described(self.o, columns)
        # What is absent is never read: any tensor will do for its pointer.
        self.cu_seqlens = self.offsets = self.places = self.announced = self.factors
        if plan.early:
            self.announced = scratch.empty((plan.tiles,), torch.int32, device)
            scratch.apply(Tensor.zero_, self.announced)
        if call.cu_seqlens is not None:
            self._locate_chunks(scratch.contiguous(call.cu_seqlens))

    def _locate_chunks(self, cu_seqlens: Tensor) -> None:
        from ..triton import macros
        from . import packing

        offsets: Any = macros.chunk_offsets_kernel
        places: Any = packing.chunk_places
        count, device = self.call.sequences, cu_seqlens.device
        self.cu_seqlens = cu_seqlens
        self.offsets = self.scratch.result((count + 1,), torch.int32, device)
        self.places = self.scratch.result((1 + self.plan.chunks, 2), torch.int32, device)
        launch = self.scratch.launch
        launch(offsets, (1,))(cu_seqlens, self.offsets, count, C=CHUNK, num_warps=4)
        chunks = (self.plan.chunks,)
        launch(places, chunks)(cu_seqlens, self.offsets, self.places, count, self.length, C=CHUNK, num_warps=1)

    def run(self) -> tuple[Tensor, Tensor]:
        spans = self.plan.spans
        if not self.plan.spare:
            for n in range(len(spans)):
                self.launch_prepare(n, 0, self._total(n))
                self.launch_scan(n)
            return self.o, self.final
        self.scratch.once()  # streams
        # Each scan on a stream of its own, beside it the first tiles of the next run on the multiprocessors it leaves
        # idle; the others wait for it, so that they have the whole machine.
        main, side = torch.cuda.current_stream(), _side_stream(self.call.q.device)
        self.launch_prepare(0, 0, self._total(0))
        for n in range(len(spans)):
            side.wait_stream(main)
            with torch.cuda.stream(side):
                self.launch_scan(n)
            if n + 1 < len(spans):
                total = self._total(n + 1)
                beside = min(total, self.plan.spare * self.plan.beside)
                self.launch_prepare(n + 1, 0, beside, self.plan.spare)
                main.wait_stream(side)
                self.launch_prepare(n + 1, beside, total)
        main.wait_stream(side)
        return self.o, self.final

    def _total(self, n: int) -> int:
        return self.plan.spans[n][1] * self.plan.tiles_per_chunk

    def launch_prepare(self, n: int, begin: int, total: int, blocks: int | None = None) -> None:
        """Tiles ``begin .. total`` of run n, on as many blocks as there are multiprocessors."""
        if begin == total:
            return
        first, _ = self.plan.spans[n]
        call, kind, early = self.call, _kind(self.call), self.plan.early
        rows, factors = self.rows[n % len(self.rows)], self.factors[n % len(self.rows)]
        squares = described(rows, (CHUNK, CHUNK))
        A_log = self.factors if call.A_log is None else self.scratch.contiguous(call.A_log)
        dt_bias = self.factors if call.dt_bias is None else self.scratch.contiguous(call.dt_bias)
        beta = self.factors if call.beta is None else call.beta
        parameters = (A_log, dt_bias, beta, *((0, 0, 0) if call.beta is None else call.beta.stride()), self.places)
        tiles = (self.value_heads, self.value_heads // call.q.shape[2], call.v.shape[0], first, begin, total)
        shared, norms = (self.plan.rounds, early), (call.scale, call.qk_l2norm_eps)
        given = {
            "HAS_A": call.A_log is not None, "HAS_DT": call.dt_bias is not None, "HAS_BETA": call.beta is not None,
            "SIGMOID_BETA": call.sigmoid_beta and call.beta is not None, "PACKED": call.cu_seqlens is not None,
            "WIDTH": self.plan.width, "READY": early > 0,
        }  # fmt: skip
        grid = (min(blocks or _multiprocessors(call.q.device), total - begin),)
        if kind == "token":
            self.scratch.launch(self.scalar, grid)(
                self.q, self.k, self.g, *self.g.stride(), *parameters, squares, factors, self.announced, self.length,
                *tiles, *shared, *norms, call.gate_scale, FN=call.gate_fn, num_warps=4, **given,
            )  # fmt: skip
            return
        given |= {"GRAM_REGISTERS": GRAM_REGISTERS[self.plan.width], "num_warps": 8}
        common = (
            self.q, self.k, self.g, *parameters, rows, squares, factors, self.announced, self.length, self.key_width,
            *tiles, *shared, *norms,
        )  # fmt: skip
        if kind == "bounded":
            shift = _shift(call.gate_scale)
            bounds = (call.gate_scale * LOG2E, float(shift), 2.0**-shift)
            self.scratch.launch(self.bounded, grid)(*common, *bounds, **given)
        else:
            self.scratch.launch(self.unbounded, grid)(*common, call.gate_scale, FN=call.gate_fn, **given)

    def launch_scan(self, n: int) -> None:
        plan = self.plan
        first, chunks = plan.spans[n]
        initial = self.call.initial_state if first == 0 else self.final
        strides = (0, 0, 0, 0) if initial is None else initial.stride()
        given = self.final if initial is None else initial
        length = -(-chunks // plan.segments)
        segments = -(-chunks // length)
        if segments == 1:
            self._scan(n, (given, 0, *strides), chunks, has_initial=initial is not None)
            return
        keys, width = plan.width, plan.padded_values + plan.width
        ends = (self.ends, self.lanes * keys * width, keys * width, width, keys, width)
        self._scan(
            n, (given, 0, *strides), length, has_initial=initial is not None, ends=ends, segments=segments - 1
        )  # fmt: skip
        self.scratch.launch(self.combine, (self.lanes, plan.padded_values // COMBINED))(
            described(self.ends.view(-1, width), (keys, keys)), self.ends, self.states, given, *strides, self.key_width,
            self.value_width, plan.padded_values, self.value_heads, segments, BLOCK=COMBINED, WIDTH=keys,
            HAS_INITIAL=initial is not None, num_warps=keys // 16, launch_pdl=not plan.spare,
        )  # fmt: skip
        states = self.states.view(-1, *self.final.shape[:2], keys, plan.padded_values)
        self._scan(n, (states, *states.stride()), length, segments=segments)

    def _scan(
        self,
        n: int,
        initial: tuple[Any, ...],
        length: int,
        *,
        has_initial: bool = True,
        ends: tuple[Any, ...] | None = None,
        segments: int = 1,
    ) -> None:
        """The scan kernel; into ``ends``: its first pass over segments."""
        plan, columns = self.plan, self.plan.columns
        state = (self.final, 0, self.key_width * self.value_width, self.value_width, self.key_width, self.value_width)
        blocks = plan.padded_values // columns + (0 if ends is None else plan.width // columns)
        slot, call = n % len(self.rows), self.call
        rows, factors = self.rows[slot], self.factors[slot]
        after = (
            self.o_out, self.o, *initial, *(ends or state), self.cu_seqlens, self.offsets, self.length, self.key_width,
            self.value_width, plan.padded_values, self.value_heads,
        )  # fmt: skip
        span = (*plan.spans[n], length)
        given = {
            "BV": columns, "WIDTH": plan.width, "STAGES": plan.stages, "HAS_INITIAL": has_initial,
            "OUTPUT": ends is None, "PACKED": call.cu_seqlens is not None, "num_warps": columns // 16,
        }  # fmt: skip
        self.scratch.launch(self.scan, (blocks, self.lanes, segments))(
            described(rows, (CHUNK, plan.width)), self.v, self.q, self.k, _line(factors, self.line), self.announced,
            *after, self.value_heads // call.q.shape[2], *span, SCALAR=call.gate == "token", READY=plan.early > 0,
            launch_pdl=not plan.spare, **given,
        )  # fmt: skip


def _kind(call: Call) -> str:
    """Which prepare kernel; "bounded": 32 tokens of the strongest gate there can be stay in range (``prepare.py``)."""
    if call.gate == "token":
        return "token"
    assert call.g is not None
    bounded = call.gate_fn == "sigmoid" and _shift(call.gate_scale) <= MAX_SHIFT and call.g.dtype is torch.bfloat16
    return "bounded" if bounded else "unbounded"


def _shift(gate_scale: float) -> int:
    """Half of the binary orders of magnitude that 32 tokens of the strongest gate span, rounded up."""
    return math.ceil(16 * -gate_scale * LOG2E)


def aligned(x: Tensor) -> bool:
    """Whether the copy engine can address x: rows that lie together, everything else in steps of 16 bytes."""
    steps = [s for n, s in zip(x.shape[:-1], x.stride(), strict=False) if n > 1]
    return x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(s > 0 and s * x.element_size() % 16 == 0 for s in steps)


def _addressed(x: Tensor, scratch: Scratch) -> Tensor:
    """x, or a copy of it that the copy engine can address."""
    return x if aligned(x) else scratch.copied(x)


def described(x: Tensor, block: tuple[int, ...]) -> Any:
    """A descriptor for the copy engine; the stride of a dimension of size 1 is free, and made a legal one."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    strides = [s if n > 1 else WIDTHS[-1] for n, s in zip(x.shape[:-1], x.stride(), strict=False)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], list(block), _layout(8 * x.element_size(), x.dim()))


def _line(x: Tensor, length: int) -> Any:
    """A descriptor of ``length`` numbers in a row, not swizzled."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor(x, list(x.shape), [1], [length], NVMMASharedLayout(0, 8 * x.element_size(), 1))


@cache
def _layout(bits: int, dimensions: int) -> Any:
    from triton.experimental.gluon.language import NVMMASharedLayout

    return NVMMASharedLayout(128, bits, dimensions)


def _triton_version() -> Version | None:
    try:
        return Version(version("triton"))
    except PackageNotFoundError:
        return None


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count

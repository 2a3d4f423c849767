"""The Hopper kernels of a call, launched."""

# pyright: reportMissingImports=false

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..calls import Call
from ..scratch import Scratch
from .descriptors import addressed, described, line
from .schedules import CHANNEL_STAGES, CHUNK, WIDTHS, Schedule, padded, schedule, tile_factors, tile_rows

MAX_SHIFT = 122  # 2^122 times a row of norm 2 is finite in bf16, and 2^-122 is normal
COMBINED = 16  # columns of V whose state a block carries from segment to segment
# A thread of the gram warps where K is wide; the row warps share what is left. Measured in steps of 8.
GRAM_REGISTERS = {"bounded": 184, "unbounded": 168, "linear": 136}
NARROW_REGISTERS = 248  # the same where K is padded to 64
# Of a tile in a block of a prepare kernel, by the padded K, on an H200.
TILE_MICROSECONDS = {
    64: {"bounded": 4.0, "unbounded": 5.1, "token": 3.3, "linear": 4.0},
    128: {
        "bounded": 4.2, "bounded, keys as they are": 4.6, "unbounded": 7.4, "unbounded, keys as they are": 8.6,
        "token": 3.7, "no gate": 3.2, "linear": 7.5,
    },
}  # fmt: skip
LOG2E = math.log2(math.e)


def kind(call: Call) -> str:
    """Which prepare kernel; "bounded": 32 tokens of the strongest gate there can be stay in range (``prepare.py``).

    "token": a gate per token, head or none at all; "linear": a gate per channel without the delta rule.
    """
    if call.gate != "channel":
        return "token"
    if not call.delta:
        return "linear"
    assert call.g is not None
    bounded = call.gate_fn == "sigmoid" and shift(call.gate_scale) <= MAX_SHIFT and call.g.dtype is torch.bfloat16
    return "bounded" if bounded else "unbounded"


def gram_registers(kernel: str, width: int) -> int:
    if width < WIDTHS[-1] and kernel != "linear":
        return NARROW_REGISTERS
    return GRAM_REGISTERS[kernel]


def tile_microseconds(call: Call, width: int) -> float:
    costs, kernel = TILE_MICROSECONDS[width], kind(call)
    name = "no gate" if call.g is None and call.delta else kernel
    return costs.get(name if call.qk_l2norm_eps else f"{kernel}, keys as they are", costs[kernel])


def shift(gate_scale: float) -> int:
    """Half of the binary orders of magnitude that 32 tokens of the strongest gate span, rounded up."""
    return math.ceil(16 * -gate_scale * LOG2E)


def scheduled(call: Call) -> Schedule:
    batch, length, heads, width = call.v.shape
    packed = None if call.cu_seqlens is None else call.sequences
    keys = padded(call.q.shape[3])
    gate = "channel" if call.gate == "channel" else "token"
    return schedule(
        batch, length, heads, width, multiprocessors(call.q.device), packed=packed, width=keys, gate=gate,
        folded=call.qk_l2norm_eps > 0 or kind(call) == "bounded",
        delta=call.delta, tile_microseconds=tile_microseconds(call, keys),
    )  # fmt: skip


def launches(call: Call, plan: Schedule, scratch: Scratch) -> Launches:
    return (DeltaLaunches if call.delta else LinearLaunches)(call, plan, scratch)


class Launches:
    """The kernels of one call, and what they need in common."""

    def __init__(self, call: Call, plan: Schedule, scratch: Scratch) -> None:
        # Here, not above: a machine without triton imports this module too.
        from . import prepare, prepare_scalar, prepare_unbounded

        self.bounded: Any = prepare.prepare
        self.unbounded: Any = prepare_unbounded.prepare_unbounded
        self.scalar: Any = prepare_scalar.prepare_scalar
        self.call, self.plan, self.scratch = call, plan, scratch
        self.length, self.value_heads, self.value_width = call.v.shape[1:]
        self.key_width = call.q.shape[3]
        self.sequence_heads = call.sequences * self.value_heads
        device = call.q.device
        self.o = scratch.result(tuple(call.v.shape), call.out_dtype, device)
        state = (call.sequences, self.value_heads, self.key_width, self.value_width)
        self.final = scratch.result(state, torch.float32, device)
        # What is absent is never read: any tensor will do for its pointer.
        self.absent = self.cu_seqlens = self.offsets = self.places = self.announced = self.final
        rows = tile_rows(plan.gate, plan.width, plan.delta)
        self.factors_of_tile = tile_factors(plan.gate, plan.width, plan.delta)
        if rows:
            self.rows = scratch.empty((plan.buffers, plan.tiles * rows, plan.width), torch.bfloat16, device)
            self.factors = scratch.empty((plan.buffers, plan.tiles * self.factors_of_tile), torch.float32, device)
        if plan.segments > 1:
            self.ends, *between = (scratch.empty(shape, torch.float32, device) for shape in plan.segment_buffers)
            self.between = between[0] if between else self.absent
        tile = (1, CHUNK, 1, plan.width)
        self.q, self.k = (described(addressed(x, scratch), tile) for x in (call.q, call.k))
        self.fn = "none" if call.g is None else call.gate_fn
        if call.g is None or call.gate == "head":
            self.g = self.final.view(-1)[:1] if call.g is None else call.g
            self.g = self.g.expand(1, 1, -1).as_strided((1, 1, self.value_heads), (0, 0, self.g.stride(0)))
        else:
            self.g = call.g if call.gate == "token" else described(addressed(call.g, scratch), tile)
        columns = (1, CHUNK, 1, plan.columns)
        self.v, self.o_out = described(addressed(call.v, scratch), columns), described(self.o, columns)
        if plan.early:
            self.announced = scratch.empty((plan.tiles,), torch.int32, device)
            scratch.apply(Tensor.zero_, self.announced)
        if call.cu_seqlens is not None:
            self._locate_chunks(scratch.contiguous(call.cu_seqlens))
        beta = self.absent if call.beta is None else call.beta
        self.parameters = (
            self.absent if call.A_log is None else scratch.contiguous(call.A_log),
            self.absent if call.dt_bias is None else scratch.contiguous(call.dt_bias),
            beta, *((0, 0, 0) if call.beta is None else call.beta.stride()),
        )  # fmt: skip
        self.given = {
            "HAS_A": call.A_log is not None, "HAS_DT": call.dt_bias is not None, "HAS_BETA": call.beta is not None,
            "SIGMOID_BETA": call.sigmoid_beta and call.beta is not None, "PACKED": call.cu_seqlens is not None,
            "RAW": not call.qk_l2norm_eps, "READY": plan.early > 0, "WIDTH": plan.width,
        }  # fmt: skip

    @property
    def apart(self) -> bool:
        """Whether the scan multiplies by beta, not ``prepare_scalar``: see ``scan.py``."""
        call = self.call
        return self.plan.gate == "token" and call.beta is not None and not call.sigmoid_beta

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

    def launch_scan(self, n: int) -> None:
        raise NotImplementedError

    def _total(self, n: int) -> int:
        return self.plan.spans[n][1] * self.plan.tiles_per_chunk

    def launch_prepare(self, n: int, begin: int, total: int, blocks: int | None = None) -> None:
        """Tiles ``begin .. total`` of run n, on as many blocks as there are multiprocessors."""
        if begin == total:
            return
        first, _ = self.plan.spans[n]
        call, kernel = self.call, kind(self.call)
        rows, factors = self.rows[n % len(self.rows)], self.factors[n % len(self.rows)]
        squares = described(rows if call.delta else rows.view(-1, CHUNK), (CHUNK, CHUNK))
        tiles = (self.value_heads, self.value_heads // call.q.shape[2], call.v.shape[0], first, begin, total)
        shared, norms = (self.plan.rounds, self.plan.early), (call.scale, call.qk_l2norm_eps)
        given = dict(self.given)
        grid = (min(blocks or multiprocessors(call.q.device), total - begin),)
        if kernel == "token":
            self.scratch.launch(self.scalar, grid)(
                self.q, self.k, self.g, *self.g.stride(), *self.parameters, self.places, squares, factors,
                self.announced, self.length, *tiles, *shared, *norms, call.gate_scale, FN=self.fn, num_warps=4, **given,
            )  # fmt: skip
            return
        given |= {"GRAM_REGISTERS": gram_registers(kernel, self.plan.width), "num_warps": 8}
        given["FOLDED"] = self.plan.few
        common = (
            self.q, self.k, self.g, *self.parameters, self.places, rows, squares, factors, self.announced, self.length,
            self.key_width, *tiles, *shared, *norms,
        )  # fmt: skip
        if kernel == "bounded":
            by = shift(call.gate_scale)
            bounds = (call.gate_scale * LOG2E, float(by), 2.0**-by)
            self.scratch.launch(self.bounded, grid)(*common, *bounds, **given)
        else:
            self.scratch.launch(self.unbounded, grid)(
                *common, call.gate_scale, FN=self.fn, DELTA=call.delta, **given
            )  # fmt: skip

    def initial(self, n: int) -> tuple[bool, Tensor, tuple[int, ...]]:
        """The state before run n: whether there is one, the tensor and its strides."""
        initial = self.call.initial_state if n == 0 else self.final
        return (False, self.final, (0, 0, 0, 0)) if initial is None else (True, initial, initial.stride())


class DeltaLaunches(Launches):
    """Of the delta rule: ``prepare`` and ``scan``, and ``combine`` between two passes over segments."""

    def __init__(self, call: Call, plan: Schedule, scratch: Scratch) -> None:
        from . import combine, scan, scan_channel

        super().__init__(call, plan, scratch)
        self.scan: Any = scan.scan
        self.scan_channel: Any = scan_channel.scan_channel
        self.combine: Any = combine.combine

    def launch_scan(self, n: int) -> None:
        plan = self.plan
        chunks = plan.spans[n][1]
        if plan.few:
            self._scan_few(n, chunks)
            return
        some, given, strides = self.initial(n)
        length = -(-chunks // plan.segments)
        segments = -(-chunks // length)
        if segments == 1:
            self._scan(n, (given, 0, *strides), chunks, has_initial=some)
            return
        keys, width = plan.width, plan.padded_values + plan.width
        ends = (self.ends, self.sequence_heads * keys * width, keys * width, width, keys, width)
        self._scan(n, (given, 0, *strides), length, has_initial=some, ends=ends, segments=segments - 1)
        self.scratch.launch(self.combine, (self.sequence_heads, plan.padded_values // COMBINED))(
            described(self.ends.view(-1, width), (keys, keys)), self.ends, self.between, given, *strides,
            self.key_width, self.value_width, plan.padded_values, self.value_heads, segments, BLOCK=COMBINED,
            WIDTH=keys, HAS_INITIAL=some, num_warps=keys // 16, launch_pdl=not plan.spare,
        )  # fmt: skip
        states = self.between.view(-1, *self.final.shape[:2], keys, plan.padded_values)
        self._scan(n, (states, *states.stride()), length, segments=segments, ahead=True)

    def _scan(
        self,
        n: int,
        initial: tuple[Any, ...],
        length: int,
        *,
        has_initial: bool = True,
        ends: tuple[Any, ...] | None = None,
        segments: int = 1,
        ahead: bool = False,
    ) -> None:
        """The scan kernel; into ``ends``: its first pass over segments."""
        plan, columns = self.plan, self.plan.columns
        state = (self.final, 0, self.key_width * self.value_width, self.value_width, self.key_width, self.value_width)
        blocks = plan.padded_values // columns + (0 if ends is None else plan.width // columns)
        slot, call = n % len(self.rows), self.call
        rows, factors = self.rows[slot], self.factors[slot]
        squares, decays = described(rows, (CHUNK, CHUNK)), line(factors, self.factors_of_tile)
        states = (self.o_out, self.o, *initial, *(ends or state))
        sizes = (self.length, self.key_width, self.value_width, plan.padded_values, self.value_heads)
        span = (*plan.spans[n], length)
        given = {
            "BV": columns, "WIDTH": plan.width, "STAGES": plan.stages, "HAS_INITIAL": has_initial,
            "OUTPUT": ends is None, "AHEAD": ahead, "PACKED": call.cu_seqlens is not None, "num_warps": columns // 16,
        }  # fmt: skip
        self.scratch.launch(self.scan, (blocks, self.sequence_heads, segments))(
            described(rows, (CHUNK, plan.width)), squares, self.v, self.q, self.k, decays, self.announced, *states,
            self.cu_seqlens, self.offsets, *sizes, self.value_heads // call.q.shape[2], *span,
            SCALAR=plan.gate == "token", READY=plan.early > 0, APART=self.apart, launch_pdl=not plan.spare, **given,
        )  # fmt: skip

    def _scan_few(self, n: int, chunks: int) -> None:
        """The scans of a run where they have few blocks: of its first chunks beside the tiles, then of segments."""
        plan, skip = self.plan, self.plan.leading
        some, initial, _ = self.initial(n)
        if skip:
            self._scan_channel(n, initial if some else None, 0, skip)
            some, initial = True, self.final
        given = initial if some else None
        length = -(-(chunks - skip) // plan.segments)
        segments = -(-(chunks - skip) // length)
        if segments > 1:
            self._scan_channel(n, given, skip, length, segments - 1, OUTPUT=False)
        self._scan_channel(n, given, skip, length, segments, AHEAD=segments > 1)

    def _scan_channel(
        self,
        n: int,
        initial: Tensor | None,
        skip: int,
        length: int,
        segments: int = 1,
        *,
        OUTPUT: bool = True,
        AHEAD: bool = False,
    ) -> None:
        """``scan_channel.py``, behind the first ``skip`` chunks of a run."""
        plan, slot = self.plan, n % len(self.rows)
        rows, factors = self.rows[slot], self.factors[slot]
        ends = self.ends.view(-1, plan.width) if plan.segments > 1 else self.final
        blocks = plan.padded_values // plan.columns + (0 if OUTPUT else plan.width // plan.columns)
        first, chunks = plan.spans[n]
        chunks, grid = (chunks - skip, segments) if OUTPUT else (segments * length, -(-segments // plan.joined))
        early, stages = CHANNEL_STAGES["outputs" if OUTPUT else "maps"]
        before = (self.final, 0, 0, 0, 0) if initial is None else (initial, *initial.stride())
        self.scratch.launch(self.scan_channel, (blocks, self.sequence_heads, grid))(
            described(rows, (CHUNK, plan.width)), described(rows, (CHUNK, CHUNK)), self.v,
            line(factors, self.factors_of_tile), described(ends.view(-1, ends.shape[-1]), (CHUNK, CHUNK)),
            self.announced, self.o_out, *before, self.final, ends,
            self.length, self.key_width, self.value_width, plan.padded_values, self.value_heads,
            first, skip, chunks, length, plan.joined, EARLY=early, STAGES=stages, READY=plan.early > 0 and not skip,
            HAS_INITIAL=initial is not None, OUTPUT=OUTPUT, AHEAD=AHEAD, num_warps=4, launch_pdl=not plan.spare,
        )  # fmt: skip


class LinearLaunches(Launches):
    """Without the delta rule: ``linear``, after ``prepare_unbounded`` where a gate is one a channel."""

    def __init__(self, call: Call, plan: Schedule, scratch: Scratch) -> None:
        from . import linear

        super().__init__(call, plan, scratch)
        self.linear: Any = linear.linear

    def launch_prepare(self, n: int, begin: int, total: int, blocks: int | None = None) -> None:
        if self.plan.gate == "channel":
            super().launch_prepare(n, begin, total, blocks)

    def launch_scan(self, n: int) -> None:
        chunks = self.plan.spans[n][1]
        length = -(-chunks // self.plan.segments)
        segments = -(-chunks // length)
        if segments > 1:
            self._linear(n, length, segments - 1, output=False)
        self._linear(n, length, segments, output=True)

    def _linear(self, n: int, length: int, segments: int, *, output: bool) -> None:
        plan, call = self.plan, self.call
        some, initial, strides = self.initial(n)
        apart = plan.segments > 1
        if plan.gate == "channel":
            rows, factors = self.rows[n % len(self.rows)], self.factors[n % len(self.rows)]
            made = (
                described(rows, (CHUNK, plan.width)), described(rows.view(-1, CHUNK), (CHUNK, CHUNK)),
                line(factors, plan.width), self.announced, self.v, self.v, self.v, self.absent, 0, 0, 0,
            )  # fmt: skip
        else:
            made = (self.v, self.v, self.v, self.announced, self.q, self.k, self.v, self.g, *self.g.stride())
        given = self.given | {"READY": self.given["READY"] and output}
        blocks = plan.padded_values // plan.columns
        self.scratch.launch(self.linear, (blocks, self.sequence_heads, segments))(
            *made, *self.parameters, self.o_out, self.o, initial, *strides, self.ends if apart else self.absent,
            self.between if apart else self.absent, self.final, self.cu_seqlens, self.offsets, self.length,
            self.key_width, self.value_width, plan.padded_values, self.value_heads,
            self.value_heads // call.q.shape[2], *plan.spans[n], length, call.scale, call.qk_l2norm_eps,
            call.gate_scale, FN=self.fn, SCALAR=plan.gate == "token", HAS_INITIAL=some, OUTPUT=output,
            STAGES=plan.stages, BV=plan.columns, num_warps=plan.columns // 16,
            launch_pdl=not plan.spare and (plan.gate == "channel" or (apart and output)), **given,
        )  # fmt: skip


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count

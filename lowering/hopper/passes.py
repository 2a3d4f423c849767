"""The Hopper kernels of a call in two passes: the maps of its parts, then its outputs.

The scan without outputs (:mod:`.scan`) is given K more columns of state, which begin as the identity and whose values
are the zeros behind the last column of V: they end as A. Without the delta rule the first pass of :mod:`.linear` leaves
A's diagonal. The chunks are prepared once and kept, or where they take more than :data:`KEPT` bytes prepared again.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..calls import Call
from ..scratch import Scratch
from .descriptors import described, line
from .launches import DeltaLaunches, Launches, LinearLaunches, multiprocessors
from .run import HopperKernels
from .schedules import CHUNK, Schedule, padded, tile_bytes, tile_rows

KEPT = 2**33
"""Bytes of prepared chunks between the passes: 66 KB a chunk and head with a gate per channel."""
COLUMNS = 64
MOST_CUTS, LEAST_TOKENS = 16, 1024


def declines(call: Call) -> str | None:
    """Why a call is not made in two passes."""
    return HopperKernels().declines(call)


def cuts(call: Call, runs: int) -> int:
    """In how many parts each of the ``runs`` of a row's tokens is best cut, so that the scan fills the machine.

    1 for packed sequences, which lie as they lie, and where not all chunks are kept.
    """
    batch, length, heads, values = call.v.shape
    if call.cu_seqlens is not None or _plan(call, 1).run * CHUNK < length:
        return 1
    found, programs = 1, batch * runs * heads * -(-values // COLUMNS)
    while 2 * found * programs <= multiprocessors(call.q.device) and found < MOST_CUTS:
        if length % (2 * found * runs * CHUNK) or length // (2 * found * runs) < LEAST_TOKENS:
            break
        found *= 2
    return found


def passes(call: Call, parts: int, scratch: Scratch | None = None) -> DeltaPasses | LinearPasses:
    """Those of a call that is not declined."""
    return (DeltaPasses if call.delta else LinearPasses)(call, parts, scratch or Scratch())


def _plan(call: Call, parts: int) -> Schedule:
    """Everything in one run if it fits, as :func:`.schedules.schedule` has it otherwise."""
    batch, length, heads, values = call.v.shape
    packed = call.cu_seqlens is not None
    sequence_heads = heads * call.sequences
    chunks = length // CHUNK + call.sequences if packed else -(-length // CHUNK)
    columns = COLUMNS
    if call.delta and values > COLUMNS and sequence_heads * -(-values // COLUMNS) > multiprocessors(call.q.device):
        columns = 2 * COLUMNS
    gate, width, tiles = "channel" if call.gate == "channel" else "token", padded(call.q.shape[3]), heads * batch
    run = min(chunks, max(1, KEPT // max(1, tiles * tile_bytes(gate, width, call.delta))))
    over, segments = -(-values // columns) * columns, 1 if call.delta else parts + 1
    return Schedule(chunks, run, columns, segments, over, tiles, sequence_heads, width, gate, call.delta)


class _TwoPasses(Launches):
    """What both sets of kernels have in common."""

    def __init__(self, call: Call, parts: int, scratch: Scratch) -> None:
        with torch.cuda.device(call.q.device):
            super().__init__(call, _plan(call, parts), scratch)
        self.parts, self.chunks = parts, -(-self.plan.run // parts)  # chunks of a part
        self._made = -1  # the last run whose chunks were prepared

    def _prepared(self, n: int) -> None:
        if self._made != n:
            self.launch_prepare(n, 0, self._total(n))
            self._made = n


class DeltaPasses(_TwoPasses, DeltaLaunches):
    """:class:`kdacompile.lowering.passes.ForwardPasses` with the delta rule."""

    def maps(self, starts: Tensor, *, enters: bool = True, leaves: bool = True) -> tuple[Tensor, Tensor]:
        heads, (keys, values) = starts.shape[:2], starts.shape[2:]
        a, written = (starts.new_zeros(self.parts, *heads, keys, width) for width in (keys, values))
        unit = torch.eye(keys, device=starts.device).expand(*heads, keys, keys)
        state, asked = starts, self.parts if leaves else self.parts - 1
        with torch.cuda.device(starts.device):
            for part in range(asked):
                columns = torch.cat([state, unit], -1) if enters else state.clone()
                self._through(part, columns)
                written[part] = columns[..., :values]
                if enters:
                    a[part], state = columns[..., values:], torch.zeros_like(starts)
                else:
                    state = columns
            if not asked:
                self._prepared(0)
        return a, written

    def outputs(self, states: Tensor) -> tuple[Tensor, Tensor]:
        self.call = replace(self.call, initial_state=states[0])
        with torch.cuda.device(states.device):
            if len(self.plan.spans) == 1:
                self._scan(0, (states, *states.stride()), self.chunks, segments=self.parts)
            else:
                for n in range(len(self.plan.spans)):
                    self._prepared(n)
                    self.launch_scan(n)
        return self.o, self.final

    def _through(self, part: int, columns: Tensor) -> None:
        """What a part makes of states ``[N, HV, K, columns]``, in place."""
        if len(self.plan.spans) == 1:
            first = part * self.chunks
            self._prepared(0)
            self._scan_columns(0, first, min(self.chunks, self.plan.run - first), columns)
            return
        for n, (_, chunks) in enumerate(self.plan.spans):
            self._prepared(n)
            self._scan_columns(n, 0, chunks, columns)

    def _scan_columns(self, n: int, begin: int, chunks: int, states: Tensor) -> None:
        """The scan without outputs, of ``chunks`` of run n from its chunk ``begin`` on."""
        plan, keys, width, columns = self.plan, self.key_width, states.shape[3], self.plan.columns
        blocks, tile = -(-width // columns), begin * plan.tiles_per_chunk
        rows = self.rows[n % len(self.rows)][tile * tile_rows(plan.gate, plan.width) :]
        factors = self.factors[n % len(self.rows)][tile * self.factors_of_tile :]
        # VP is where the kernel would begin an identity of its own, in tf32: behind the last column.
        after = (
            self.o_out, self.o, states, 0, *states.stride(), states, 0, keys * width, width, keys, width,
            self.cu_seqlens, self.offsets, self.length, keys, width, blocks * columns, self.value_heads,
        )  # fmt: skip
        self.scratch.launch(self.scan, (blocks, self.sequence_heads, 1))(
            described(rows, (CHUNK, plan.width)), described(rows, (CHUNK, CHUNK)), self.v, self.q, self.k,
            line(factors, self.factors_of_tile),
            self.announced, *after, self.value_heads // self.call.q.shape[2], plan.spans[n][0] + begin, chunks, chunks,
            SCALAR=plan.gate == "token", READY=False, BV=columns, WIDTH=plan.width, STAGES=plan.stages,
            HAS_INITIAL=True, OUTPUT=False, AHEAD=False, PACKED=self.call.cu_seqlens is not None, APART=self.apart,
            num_warps=columns // 16, launch_pdl=True,
        )  # fmt: skip


class LinearPasses(_TwoPasses, LinearLaunches):
    """The same without it."""

    def maps(self, starts: Tensor, *, enters: bool = True, leaves: bool = True) -> tuple[Tensor, Tensor]:
        heads, (keys, values) = starts.shape[:2], starts.shape[2:]
        kept = written = None
        with torch.cuda.device(starts.device):
            for n in range(len(self.plan.spans)):
                self._prepared(n)
                self._pass(n, output=False)
                decay = self.between.view(self.parts, *heads, -1)[..., :keys, None]
                here = self.ends.view(self.parts, *heads, -1, self.plan.width)[..., :values, :keys].mT
                written = here.clone() if written is None else decay * written + here
                kept = decay.clone() if kept is None else decay * kept
        assert kept is not None and written is not None
        written[0] += kept[0] * starts
        return kept, written

    def outputs(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Each block sums what the parts before its own have left."""
        self.call = replace(self.call, initial_state=states[0])
        with torch.cuda.device(states.device):
            for n in range(len(self.plan.spans)):
                self._prepared(n)
                self._pass(n, output=True)
        return self.o, self.final

    def _pass(self, n: int, *, output: bool) -> None:
        whole = len(self.plan.spans) == 1
        self._linear(n, self.chunks if whole else self.plan.spans[n][1], self.parts, output=output)

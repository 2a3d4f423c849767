"""Launching the hand-tuned kernels of the backward pass: bf16, K = 128, on Hopper.

They stand in for the emitted ones. With a gate per channel they leave the same in the same buffers, and a factor's
first and third phase are the emitted ones; with a gate per token or head, or none, they have buffers of their own.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..calls import Call
from ..gates import GATE_FUNCTIONS
from ..triton.backward_run import Backward, Buffers, TritonGradients, bytes_of
from ..triton.backward_schedule import schedule
from ..triton.run import tensor_arguments
from . import progress
from .descriptors import aligned, described, line
from .run import machine

WIDTH, CHUNK = 128, 64
COLUMNS = 64  # of V, in a block of the scan
LOWEST = -5.0  # of log gates, for the kernels of ``backward_bounded.py``
FEWEST = 16  # chunks of a sequence whose gradients begin beside the scan
FEW = 48  # blocks of the scan in each direction, that leave many multiprocessors idle
APART = 16  # elements: what copies to shared memory ask of strides
MOST_SCALE = 2.0**60  # the scan works on gradients over the scale


class HopperGradients(TritonGradients):
    """:class:`kdacompile.lowering.adjoint.GradientKernels`: every row in bf16, K = 128, V = 128.

    With a gate per token or head, or none, V may be 64 as well.
    """

    name = "hopper"

    def declines(self, call: Call) -> str | None:
        reason = super().declines(call)
        if reason is not None:
            return reason
        wide, narrow = call.q.shape[-1], call.v.shape[-1]
        fits = wide == WIDTH and (narrow == WIDTH or (narrow == WIDTH // 2 and call.gate != "channel"))
        if not fits or call.compute_dtype is not torch.bfloat16:
            return "only bf16 heads of 128 channels have hand-tuned kernels"
        length, wish = call.v.shape[1], call.chunk_size
        if schedule(WIDTH, WIDTH, length, 2, channels=True, blocks=True, chunk_size=wish).chunk != CHUNK:
            return "only chunks of 64 tokens have hand-tuned kernels"
        if call.gate_fn == "factor" and call.gate != "channel":
            return "a factor's gradient divides by it: left to the emitted kernels"
        if not 1 / MOST_SCALE <= abs(call.scale) <= MOST_SCALE:
            return "gradients over a scale of 0 or beyond 2^60: left to the emitted kernels"
        return machine(call.q)

    @property
    def execution(self) -> type[Backward]:
        return HopperBackward


class HopperBackward(Backward):
    """One execution, with other kernels for some of its launches."""

    _turns: tuple[dict[str, Tensor], ...] = ()

    @property
    def _by_blocks(self) -> bool:
        """Whether the first and the third phase are those of a gate per channel; a factor's gradient divides by it."""
        return self._call.gate == "channel" and self._call.gate_fn != "factor"

    @property
    def _by_token_gates(self) -> bool:
        """Whether they are those of a gate per token or head, or of none."""
        return self._call.gate != "channel"

    @property
    def _bounded(self) -> bool:
        """Whether decays over 16 tokens of the strongest gate there can be stay in range."""
        lowest = GATE_FUNCTIONS[self._call.gate_fn].lower_bound(self._call.gate_scale)
        return self._call.gate == "channel" and lowest >= LOWEST

    @property
    def _solved(self) -> bool:
        """Where keys have norms of 1, whatever beta is."""
        call = self._call
        return (self._by_blocks or self._by_token_gates) and call.delta and call.qk_l2norm_eps > 0.0

    @property
    def _pairs_in_scan(self) -> bool:
        """Whether the scan makes P, which no gate and no end of a sequence inside of a chunk touch."""
        return self._call.gate == "none" and self._call.delta and self._call.cu_seqlens is None

    def _normed_apart(self, call: Call) -> bool:
        return call.qk_l2norm_eps > 0.0 and not self._by_blocks and not self._by_token_gates

    def _rate_parts(self) -> int:
        return 1 if self._by_blocks else super()._rate_parts()

    def _operands(self, grad_state: Tensor | None) -> dict[str, Any]:
        values = super()._operands(grad_state) | {"SCALAR": self._by_token_gates, "BOUNDED": self._bounded, "EARLY": ""}
        values |= {"SOLVED": self._solved, "PAIRS": not self._pairs_in_scan}
        values |= {"over": self._call.scale, "times": self._call.scale}
        for name, x in (("q", self._call.q), ("k", self._call.k), ("v", self._call.v), ("do", self._grad_o)):
            values |= tensor_arguments(name, "bthd", self._rows(self._scratch.cast(x, torch.bfloat16)))
        if self._call.gate == "channel" and self._call.g is not None:
            values |= tensor_arguments("g", "bthd", self._rows(self._call.g))
        return values

    def _rows(self, x: Tensor) -> Tensor:
        """``x`` with rows that are copied 16 bytes at a time, or a copy of it."""
        steps = all(step % APART == 0 for step in x.stride()[:-1])
        return x if steps and aligned(x) and x.data_ptr() % (2 * APART) == 0 else self._scratch.copied(x)

    def _kept(self, wanted: Buffers, tiles: int) -> Buffers:
        if self._early(tiles // self._chunks):
            wanted["done"] = ((2 * progress.rounds(self._chunks),), torch.int32)
        if self._solved:
            wanted.pop("a")
        if self._pairs_in_scan:
            wanted.pop("p")
        if self._by_blocks:
            wanted = {name: buffer for name, buffer in wanted.items() if name not in ("l", "own", "factors", "masks")}
            return wanted | {"lines": ((tiles, 4, WIDTH), torch.float32)}
        if not self._by_token_gates:
            return wanted
        kept = {name: buffer for name, buffer in wanted.items() if name not in _OF_CHANNELS}
        if self._call.gate == "none":
            kept.pop("l", None)
        else:
            kept["sums"] = ((tiles, CHUNK), torch.float32)
        return kept

    def _over(self, wanted: Buffers, heads: int) -> dict[str, tuple[str, int]]:
        """What the third phase does not read lies where it will write gradients, if it does so once, ``a`` in ``z``."""
        lent = () if heads != self._heads else _UNREAD if self._by_blocks else ("x",) if self._by_token_gates else ()
        if self._early(heads) == "middle":  # the scan is not through with those that lie there at half their size
            lent = tuple(name for name in lent if name not in ("x", "p"))
        hosts = {name: self._found[name] for name in ("dq", "dk", "dv", "dg") if name in self._found}
        room = {name: [0, host.nbytes] for name, host in hosts.items() if host.is_contiguous()}
        over = dict[str, tuple[str, int]]()
        for name in (name for name in lent if name in wanted):
            size = bytes_of(*wanted[name])
            host = next((host for host, (begin, end) in room.items() if end - begin >= size), None)
            if host is not None:
                over[name] = host, room[host][0]
                room[host][0] += size
        if "a" in wanted and not self._in_turn(heads):  # the inverse reads it before the scan writes z
            over["a"] = "z", 0
        return over

    def _early(self, heads: int) -> str:
        """Where the gradients begin beside the scan of so many heads, see ``backward_early.py``; "": behind it."""
        narrow = all(self._found[name].dtype.itemsize == 2 for name in ("dq", "dk", "dv"))
        alone = self._call.cu_seqlens is None and self._call.q.shape[0] == 1 and self._chunks >= FEWEST
        if not (narrow and alone and (self._by_blocks or self._by_token_gates)):
            return ""
        return "middle" if heads * (self._columns // COLUMNS) < FEW else "end"

    def _in_turn(self, heads: int) -> bool:
        """Whether some heads are made ready beside the gradients of those before, which read what that leaves."""
        return heads != self._heads and self._by_blocks and self._early(heads) != ""

    def _buffers(self, heads: int) -> dict[str, Any]:
        values = super()._buffers(heads)
        if self._in_turn(heads):
            nothing = self._call.q
            own = {name: values[name] for name in _READ if values[name] is not nothing}
            self._turns = own, {name: self._scratch.empty(tuple(x.shape), x.dtype, x.device) for name, x in own.items()}
        return values

    def _phases(self, heads: int, *, ready: bool = False) -> None:
        self._values["EARLY"] = self._early(heads)
        if self._in_turn(heads):
            turn = self._values["first_head"] // heads
            self._values |= self._turns[turn % 2] | {"BESIDE": turn > 0}
        super()._phases(heads, ready=ready)

    def _ahead(self, heads: int) -> None:
        self._values["EARLY"] = self._early(heads)
        super()._ahead(heads)

    def _prepare(self, tiles: int) -> None:
        if self._by_token_gates:
            self._tuned("prepare_scalar", (tiles,), 4, maxnreg=128, launch_pdl=self._values["BESIDE"])
        elif self._by_blocks:
            self._tuned("prepare", (tiles,), 4, maxnreg=168, launch_pdl=self._values["BESIDE"])
        else:
            super()._prepare(tiles)

    def _part(self, first: int, chunks: int) -> Backward:
        """Between runs the gradients of states stay over the scale."""
        part, scale = super()._part(first, chunks), self._call.scale
        last = (first + chunks) * self._call.q.shape[0] == self._chunks
        part._values |= {"over": scale if last else 1.0, "times": scale if first == 0 else 1.0}
        return part

    def _scan(self, heads: int, *, ahead: bool = False) -> None:
        early = "" if ahead else self._values["EARLY"]
        self._values |= {"FORWARD": 0, "AHEAD": ahead, "EARLY": early}
        self._launch_scan(heads, 1 if ahead else 2)

    def _scan_back(self, heads: int) -> None:
        self._values |= {"FORWARD": 1, "AHEAD": False}
        self._launch_scan(heads, 1)

    def _launch_scan(self, heads: int, directions: int) -> None:
        blocks = self._call.sequences * heads * self._columns // COLUMNS
        self._values |= self._descriptors()
        self._tuned("scan", (blocks, directions), 4, **self._beside())

    def _descriptors(self) -> dict[str, Any]:
        """What the scan has the copy engine fetch; what it does not read is anything."""
        values, call, scalar = self._values, self._call, self._by_token_gates
        columns, width = (1, CHUNK, 1, COLUMNS), (1, CHUNK, 1, WIDTH)
        nothing = described(values["v_ptr"], columns)
        found = dict.fromkeys(("d_p", "d_x", "d_kg", "d_beta", "d_gates", "d_rates"), nothing)
        found |= {"d_v": nothing, "d_do": described(values["do_ptr"], columns)}
        leaves = {
            "d_s": ("s", WIDTH),
            "d_d": ("d", WIDTH),
            "d_y": ("y" if call.delta else "z", CHUNK),
            "d_z": ("z", CHUNK),
        }
        for name, (buffer, size) in leaves.items():
            found[name] = described(values[f"{buffer}_buffer"].view(-1, self._columns), (size, COLUMNS))
        rows = {} if self._pairs_in_scan else {"d_p": ("p", CHUNK)}
        rows |= {"d_x": ("x", CHUNK)} if call.delta else {}
        lines = {"d_beta": ("beta", CHUNK)} if call.beta is not None else {}
        if scalar:
            found |= {"d_keys": described(values["k_ptr"], width), "d_queries": described(values["q_ptr"], width)}
            lines |= {"d_gates": ("sums", CHUNK)} if call.gate != "none" else {}
            lines |= {"d_rates": ("rate", WIDTH)} if call.qk_l2norm_eps > 0.0 else {}
        else:
            rows |= {"d_keys": ("kd", WIDTH), "d_queries": ("qg", WIDTH)}
            rows |= {"d_kg": ("kg", WIDTH)} if call.delta else {}
            lines |= {"d_gates": ("total", WIDTH)}
        for name, (buffer, size) in rows.items():
            found[name] = described(values[f"{buffer}_buffer"].view(-1, size), (CHUNK, size))
        return found | {name: line(values[f"{buffer}_buffer"].view(-1), size) for name, (buffer, size) in lines.items()}

    def _by_token(self, tiles: int) -> None:
        self._values["NORM_INSIDE"] = self._call.qk_l2norm_eps > 0.0 and not self._gathered
        if self._by_token_gates:
            self._tuned("gradients_scalar", (tiles,), 4, **self._beside())
        elif self._by_blocks:
            self._tuned("gradients", (tiles,), 4, **self._beside())
        else:
            super()._by_token(tiles)

    def _beside(self) -> dict[str, bool]:
        return {"launch_pdl": True} if self._values["EARLY"] else {}

    @property
    def _chained(self) -> bool:
        return self._values["EARLY"] != "" and not self._gathered

    def _tuned(self, name: str, grid: tuple[int, ...], warps: int, **options: int) -> None:
        kernel = _kernels()[name]
        arguments = {argument: self._values[argument] for argument in kernel.arg_names}
        self._scratch.launch(kernel, grid)(**arguments, num_warps=warps, **options)


_READ = "lines_buffer", "beta_buffer", "rate_buffer", "done_buffer"  # by the gradients, of what the first kernel leaves
_UNREAD = ("qg", "kg", "kd", "x", "p")  # by the kernel of gradients with a gate per channel
_OF_CHANNELS = (
    "qg",
    "kg",
    "kd",
    "total",
    "own",
    "dlog",
)  # what kernels for a gate per channel hand on, or emitted ones


@cache
def _kernels() -> dict[str, Any]:
    """Imported where they are needed: the package is optional."""
    from .backward_gradients import gradients
    from .backward_prepare import prepare
    from .backward_scalar import gradients_scalar, prepare_scalar
    from .backward_scan import scan

    kernels = {"prepare": prepare, "scan": scan, "gradients": gradients}
    return kernels | {"prepare_scalar": prepare_scalar, "gradients_scalar": gradients_scalar}

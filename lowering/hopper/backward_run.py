"""Launching the hand-tuned kernels of the backward pass: bf16, K = 128, on Hopper.

They stand in for the emitted ones. With a gate per channel they leave the same in the same buffers, and a factor's
first and third phase are the emitted ones; with a gate per token or head, or none, they have buffers of their own.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..calls import Call
from ..gates import GATE_FUNCTIONS
from ..triton.backward_run import Backward, Buffers, TritonGradients, schedule
from ..triton.run import tensor_arguments
from .run import machine

WIDTH, CHUNK = 128, 64
COLUMNS = 64  # of V, in a block of the scan
LOWEST = -5.0  # of log gates, for the kernels of ``backward_bounded.py``
EVERY = 8  # chunks: how often the scan says what is done
FEW = 48  # blocks of the scan in each direction, that leave many multiprocessors idle
APART = 16  # elements: what copies to shared memory ask of strides


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
        if schedule(WIDTH, WIDTH, call.v.shape[1], 2, channels=True, chunk_size=call.chunk_size).chunk != CHUNK:
            return "only chunks of 64 tokens have hand-tuned kernels"
        if call.gate_fn == "factor" and call.gate != "channel":
            return "a factor's gradient divides by it: left to the emitted kernels"
        return machine(call.q)

    @property
    def execution(self) -> type[Backward]:
        return HopperBackward


class HopperBackward(Backward):
    """One execution, with other kernels for some of its launches."""

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

    def _normed_apart(self, call: Call) -> bool:
        return call.qk_l2norm_eps > 0.0 and not self._by_blocks and not self._by_token_gates

    def _rate_parts(self) -> int:
        return 1 if self._by_blocks else super()._rate_parts()

    def _operands(self, grad_state: Tensor | None) -> dict[str, Any]:
        values = super()._operands(grad_state) | {"SCALAR": self._by_token_gates, "BOUNDED": self._bounded, "EARLY": ""}
        for name, x in (("q", self._call.q), ("k", self._call.k), ("v", self._call.v), ("do", self._grad_o)):
            values |= tensor_arguments(name, "bthd", self._rows(self._scratch.cast(x, torch.bfloat16)))
        if self._call.gate == "channel" and self._call.g is not None:
            values |= tensor_arguments("g", "bthd", self._rows(self._call.g))
        return values

    def _rows(self, x: Tensor) -> Tensor:
        """``x`` with rows that are copied 16 bytes at a time, or a copy of it."""
        steps = all(step % APART == 0 for step in x.stride()[:-1])
        fits = steps and x.stride(-1) == 1 and x.data_ptr() % (2 * APART) == 0
        return x if fits else self._scratch.copied(x)

    def _kept(self, wanted: Buffers, tiles: int) -> Buffers:
        if self._early(tiles // self._chunks):
            wanted["done"] = ((2 * -(-self._chunks // EVERY),), torch.int32)
        if self._by_blocks:
            wanted.pop("l", None)
            del wanted["own"]
            return wanted | {"lines": ((tiles, 4, WIDTH), torch.float32)}
        if not self._by_token_gates:
            return wanted
        kept = {name: buffer for name, buffer in wanted.items() if name not in _OF_CHANNELS}
        if self._call.gate == "none":
            kept.pop("l", None)
        else:
            kept["sums"] = ((tiles, CHUNK), torch.float32)
        return kept

    def _made(self, wanted: Buffers, heads: int) -> dict[str, Tensor]:
        """What the third phase does not read lies where it will write gradients, if it does so once, ``a`` in ``z``."""
        over = () if heads != self._heads else _UNREAD if self._by_blocks else ("x",) if self._by_token_gates else ()
        if self._early(heads) == "middle":  # the scan is not through with those that lie there at half their size
            over = tuple(name for name in over if name not in ("x", "p"))
        hosts = [
            self._found[name].view(-1).view(torch.uint8) for name in ("dq", "dk", "dv", "dg") if name in self._found
        ]
        lent = {}
        for name in (name for name in over if name in wanted):
            size = _bytes(*wanted[name])
            host = next((n for n, host in enumerate(hosts) if host.numel() >= size), None)
            if host is not None:
                lent[name], hosts[host] = hosts[host][:size], hosts[host][size:]
        made = super()._made({name: wanted[name] for name in wanted if name not in (*lent, "a")}, heads)
        if "a" in wanted:  # the inverse reads it before the scan writes z
            lent["a"] = made["z"].view(-1).view(torch.uint8)[: _bytes(*wanted["a"])]
        for name, place in lent.items():
            shape, dtype = wanted[name]
            made[name] = place.view(dtype).view(shape)
            if self._scratch.poison:
                made[name].fill_(float("nan"))
        return made

    def _early(self, heads: int) -> str:
        """Where the gradients begin beside the scan of so many heads, see ``backward_early.py``; "": behind it."""
        narrow = all(self._found[name].dtype.itemsize == 2 for name in ("dq", "dk", "dv"))
        alone = self._call.cu_seqlens is None and self._call.q.shape[0] == 1 and self._chunks >= 2 * EVERY
        if not (narrow and alone and (self._by_blocks or self._by_token_gates)):
            return ""
        return "middle" if heads * (self._columns // COLUMNS) < FEW else "end"

    def _phases(self, heads: int) -> None:
        self._values["EARLY"] = self._early(heads)
        super()._phases(heads)

    def _prepare(self, tiles: int) -> None:
        if self._by_token_gates:
            self._tuned("prepare_scalar", (tiles,), 4, maxnreg=160)
        elif self._by_blocks:
            self._tuned("prepare", (tiles,), 4, maxnreg=168)
        else:
            super()._prepare(tiles)

    def _scan(self, heads: int) -> None:
        self._values["FORWARD"] = 0
        self._tuned("scan", (self._call.sequences * heads * (self._columns // COLUMNS), 2), 8, **self._beside())

    def _scan_back(self, heads: int) -> None:
        self._values["FORWARD"] = 1
        self._tuned("scan", (self._call.sequences * heads * (self._columns // COLUMNS), 1), 8)

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

    def _tuned(self, name: str, grid: tuple[int, ...], warps: int, **options: int) -> None:
        kernel = _kernels()[name]
        arguments = {argument: self._values[argument] for argument in kernel.arg_names}
        self._scratch.launch(kernel, grid)(**arguments, num_warps=warps, **options)


_UNREAD = ("qg", "kg", "kd", "x", "p")  # by the kernel of gradients with a gate per channel
_OF_CHANNELS = (
    "qg",
    "kg",
    "kd",
    "total",
    "own",
    "dlog",
)  # what kernels for a gate per channel hand on, or emitted ones


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


@cache
def _kernels() -> dict[str, Any]:
    """Imported where they are needed: the package is optional."""
    from .backward_gradients import gradients
    from .backward_prepare import prepare
    from .backward_scalar import gradients_scalar, prepare_scalar
    from .backward_scan import scan

    kernels = {"prepare": prepare, "scan": scan, "gradients": gradients}
    return kernels | {"prepare_scalar": prepare_scalar, "gradients_scalar": gradients_scalar}

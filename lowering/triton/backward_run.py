"""Launching the kernels of the backward pass; its mathematics is in ``lowering/adjoint.py``.

Operands of products are bf16 for bf16 inputs. For fp16 they are TF32, which rounds as fp16 does and has the range that
gradients need; fp32 inputs are computed to fp32 accuracy, or with TF32 where the user asked torch for that.
"""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..adjoint import Gradients
from ..ahead import compile_ahead
from ..calls import Call
from ..gates import GATE_FUNCTIONS
from ..scratch import Scratch
from .backward_schedule import schedule
from .configs import GATE_LIMIT, padded
from .device import on, precision, synchronous
from .run import TritonKernels, inverse_precision, launch, pack, tensor_arguments, triton_dtype

Buffers = dict[str, tuple[tuple[int, ...], torch.dtype]]

_NOT_KEPT = ("a", "s", "d", "y", "z")
"""Buffers that nothing reads behind the run they were made for."""

WIDE_LIMIT = -5.0
"""A bound of log gates 32 of which keep the factors of pairs in fp32's range, with keys that are normalised."""

LANES, TILES = 32, 4096
"""Sequences times heads, and chunks times heads, that keep a GPU busy."""

MOST, RUN = 2**30, 400 * 2**20
"""Bytes of buffers beyond which the chunks of a sequence are cut into runs, and those of a run."""


def bytes_of(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


class TritonGradients:
    """:class:`kdacompile.lowering.adjoint.GradientKernels`: every row, every shape up to K = V = 256, any strides."""

    name = "triton"

    @property
    def execution(self) -> type[Backward]:
        return Backward

    def declines(self, call: Call) -> str | None:
        return TritonKernels().declines(call)

    def gradients(
        self, call: Call, grad_o: Tensor | None, grad_state: Tensor | None, scratch: Scratch | None = None
    ) -> Gradients:
        scratch = scratch or Scratch()
        with on(call.q.device):
            compile_ahead(lambda ahead: self.execution(call, grad_o, grad_state, ahead).run(), scratch)
            return self.execution(call, grad_o, grad_state, scratch).run()


class Backward:
    """One execution: what every kernel is given, and the launches in their order."""

    def __init__(self, call: Call, grad_o: Tensor | None, grad_state: Tensor | None, scratch: Scratch) -> None:
        self._call, self._scratch, self._grad_state = call, scratch, grad_state
        self._shared: dict[str, Tensor] = {}  # buffers that are there already
        batch, self._length, self._key_heads, self._width = call.q.shape
        self._heads, self._columns = call.v.shape[2:]
        self._dtype = torch.bfloat16 if call.compute_dtype is torch.bfloat16 else torch.float32
        self._plan = schedule(
            self._width, self._columns, self._length, self._dtype.itemsize, channels=call.gate == "channel",
            blocks=self._blocks, chunk_size=call.chunk_size,
        )  # fmt: skip
        packed = call.cu_seqlens is not None
        self._chunks = batch * -(-self._length // self._plan.chunk)
        if packed:
            self._chunks = self._length // self._plan.chunk + call.sequences  # the most there can be
        self._gathered = self._normed_apart(call) or self._heads != self._key_heads
        self._grad_o = call.q.new_zeros(()).expand(call.v.shape) if grad_o is None else grad_o
        self._values = self._operands(grad_state)
        self._found = self._results()

    def _normed_apart(self, call: Call) -> bool:
        """Whether the norms' gradients are left to a kernel of their own."""
        return call.qk_l2norm_eps > 0.0

    def _exact(self) -> bool:
        """Whether every pair of tokens has decays of its own; else those of the same 16 share factors."""
        return self._dtype is torch.float32 or self._call.gate_fn == "factor"

    @property
    def _blocks(self) -> bool:
        """Whether decays of a gate per channel are made by blocks of tokens."""
        return self._call.gate == "channel" and not self._exact()

    @property
    def _solved(self) -> bool:
        """Whether the first kernel leaves X, and not what X is made from."""
        return False

    def run(self) -> Gradients:
        call, plan = self._call, self._plan
        if call.cu_seqlens is not None:
            self._values |= pack(call.cu_seqlens, plan.chunk, self._scratch)
        heads, chunks = self._cut()
        if chunks < self._chunks // call.q.shape[0]:
            self._in_runs(heads, chunks)
            return self._gradients()
        self._values |= self._buffers(heads)
        for first_head in range(0, self._heads, heads):
            self._values["first_head"] = first_head
            self._phases(heads)
        return self._gradients()

    def _cut(self) -> tuple[int, int]:
        """Heads, and chunks of a sequence, that are worked on together; those of packed sequences are not cut."""
        heads, batch = self._group(), self._call.q.shape[0]
        chunks = self._chunks // batch
        if self._call.cu_seqlens is not None or chunks == 1 or self._size(heads) <= MOST:
            return heads, chunks
        heads = self._heads if batch == 1 else heads
        return heads, max(1, chunks * RUN // self._size(heads))

    def _size(self, heads: int) -> int:
        """Bytes of the buffers of so many heads."""
        return sum(self._sizes(heads).values())

    def _sizes(self, heads: int) -> dict[str, int]:
        wanted = self._wanted(heads)
        over = self._over(wanted, heads)
        return {name: bytes_of(*buffer) for name, buffer in wanted.items() if name not in over}

    def _in_runs(self, heads: int, chunks: int) -> None:
        """By runs of so many chunks of each sequence, whose buffers lie in the same memory.

        The states before them are found first, from the first run on, then everything, from the last run on. What was
        made ready for the states is kept where there is room for it, else made again.
        """
        of_sequence = self._chunks // self._call.q.shape[0]
        starts = range(0, of_sequence, chunks)
        states, end = self._states(len(starts))
        self._found["dstate"] = end
        self._values |= tensor_arguments("final", "nhkv", end) | {"STATE": True, "FINAL": True, "HP": heads}
        parts = [self._part(first, min(chunks, of_sequence - first)) for first in starts]
        sizes = parts[0]._sizes(heads)
        again = {name: sizes.pop(name) for name in _NOT_KEPT if name in sizes}
        kept = sum(again.values()) + len(parts) * sum(sizes.values()) <= MOST
        for n, part in enumerate(parts):
            part._values |= tensor_arguments("state", "nhkv", states[n]) | part._buffers(heads)
            part._values |= {"last_ptr": states[min(n + 1, len(parts) - 1)], "BESIDE": kept and n > 0}
            for name in again if kept else again | sizes:
                self._shared.setdefault(name, part._values[f"{name}_buffer"])
        for first_head in range(0, self._heads, heads):
            for part in parts:
                part._values["first_head"] = first_head
                if part is not parts[-1]:
                    part._ahead(heads)
            for part in reversed(parts):
                part._phases(heads, ready=kept and part is not parts[-1])

    def _states(self, runs: int) -> tuple[Tensor, Tensor]:
        """Those before every run, the first of which is there, and the gradient of those behind the last one."""
        call, device = self._call, self._call.q.device
        shape = (call.sequences, self._heads, self._width, self._columns)
        states, end = self._scratch.empty((runs, *shape), torch.float32, device), self._found.get("dstate")
        end = self._scratch.empty(shape, torch.float32, device) if end is None else end
        for to, given in ((states[0], call.initial_state), (end, self._grad_state)):
            self._scratch.apply(Tensor.zero_, to) if given is None else self._scratch.apply(Tensor.copy_, to, given)
        return states, end

    def _part(self, first: int, chunks: int) -> Backward:
        """The same for so many chunks of each sequence, from its chunk ``first`` on."""
        part, batch, begin = copy(self), self._call.q.shape[0], first * self._plan.chunk
        end = min(begin + chunks * self._plan.chunk, self._length)
        part._chunks = batch * chunks
        part._found = dict(self._found)
        for name, x in self._found.items():
            if name in ("dbias", "drate"):
                rows = batch * x.shape[0] // self._chunks
                part._found[name] = x[first * rows : (first + chunks) * rows]
            elif name != "dstate":
                part._found[name] = x[:, begin:end]
        tokens = {f"{name}_ptr": self._values[f"{name}_ptr"][:, begin:end] for name in "q k v do g beta".split()}
        part._values = self._values | tokens | {"T": end - begin}
        return part

    def ready(self) -> None:
        """Of :class:`kdacompile.lowering.passes.BackwardPasses`: all heads together, whose states are one message."""
        with on(self._call.q.device):
            if self._call.cu_seqlens is not None:
                self._values |= pack(self._call.cu_seqlens, self._plan.chunk, self._scratch)
            self._values |= self._buffers(self._heads) | {"first_head": 0, "HP": self._heads}
            self._make_ready(self._chunks * self._heads)

    def asked(self, grad_state: Tensor) -> Tensor:
        """The same. The scan runs once more, over the same prepared chunks."""
        with on(self._call.q.device):
            self._end_in(grad_state)
            self._scan_back(self._heads)
        return self._found["dstate"].clone()

    def gradients(self, grad_state: Tensor) -> Gradients:
        """The same."""
        with on(self._call.q.device):
            self._end_in(grad_state)
            self._scan(self._heads)
            self._by_token(self._chunks * self._heads)
        return self._gradients()

    def _end_in(self, grad_state: Tensor) -> None:
        self._values |= tensor_arguments("final", "nhkv", grad_state) | {"FINAL": True}

    def _scan_back(self, heads: int) -> None:
        """The scan, of which the gradients of the initial states are wanted alone."""
        self._scan(heads)

    def _group(self) -> int:
        """Heads that are worked on together, in the same buffers as the others: no fewer than fill a GPU."""
        for heads in range(1, self._heads):
            fills = self._call.sequences * heads >= LANES and self._chunks * heads >= TILES
            if self._heads % heads == 0 and fills:
                return heads
        return self._heads

    def _phases(self, heads: int, *, ready: bool = False) -> None:
        self._values["HP"], tiles = heads, self._chunks * heads
        if not ready:
            self._make_ready(tiles)
        self._scan(heads)
        self._by_token(tiles)

    def _ahead(self, heads: int) -> None:
        """The first phase, and the states behind it all."""
        self._make_ready(self._chunks * heads)
        self._scan(heads, ahead=True)

    def _make_ready(self, tiles: int) -> None:
        """The first phase."""
        self._prepare(tiles)
        if self._call.delta and not self._solved:
            self._run(_kernels().inverse, (tiles,), {}, num_warps=1)

    def _prepare(self, tiles: int) -> None:
        blocks = {"BK": self._plan.prepare_keys}
        self._run(_kernels().prepare, (tiles,), blocks, num_warps=self._plan.prepare_warps, num_stages=1)

    def _scan(self, heads: int, *, ahead: bool = False) -> None:
        """The second phase; ``ahead``: the states behind it are wanted alone."""
        plan = self._plan
        programs = self._call.sequences * heads * (padded(self._columns) // plan.scan_columns)
        options = {"num_warps": plan.scan_warps, "num_stages": plan.scan_stages}
        blocks = {"BV": plan.scan_columns, "AHEAD": ahead}
        self._run(_kernels().scan, (programs, 1 if ahead else 2), blocks, **options)

    def _by_token(self, tiles: int) -> None:
        """The third phase: the gradients of a chunk's tokens."""
        plan, kernels = self._plan, _kernels()
        self._run(kernels.pair_gradients, (tiles,), {"BV": min(plan.columns, 64)}, num_warps=plan.warps, num_stages=1)
        if self._blocks:
            blocks = {"BV": min(padded(self._columns), 32)}
            self._run(kernels.through_states, (tiles,), blocks, num_warps=plan.state_warps, num_stages=2)
        parts = 1 if self._values["GATE"] == "scalar" else padded(self._width) // plan.keys
        blocks = {"BK": plan.keys, "BV": plan.columns}
        self._run(kernels.gradients, (tiles * parts,), blocks, num_warps=plan.key_warps, num_stages=1, **plan.limits)

    def _run(self, kernel: Any, grid: tuple[int, ...], blocks: dict[str, int], **options: int) -> None:
        given = {**self._values, **blocks}
        arguments = {name: given[name] for name in kernel.arg_names}
        self._scratch.launch(kernel, grid)(**arguments, **options, **synchronous(self._call.q.device))

    def _operands(self, grad_state: Tensor | None) -> dict[str, Any]:
        call, nothing = self._call, self._call.q
        g = call.g
        if g is not None and call.gate == "head":
            g = g.expand(call.q.shape[0], self._length, -1)
        if g is not None and g.dim() == 3:
            g = g.unsqueeze(-1)
        tokens = {"q": call.q, "k": call.k, "v": call.v, "g": nothing if g is None else g, "do": self._grad_o}
        values: dict[str, Any] = {}
        for name, x in tokens.items():
            values |= tensor_arguments(name, "bthd", x)
        values |= tensor_arguments("beta", "bth", nothing[..., 0] if call.beta is None else call.beta)
        state = call.initial_state
        values |= tensor_arguments("state", "nhkv", nothing if state is None else state)
        values |= tensor_arguments("final", "nhkv", nothing if grad_state is None else grad_state)
        for name, x in (("A_log", call.A_log), ("dt_bias", call.dt_bias)):
            values[f"{name}_ptr"] = nothing if x is None else self._scratch.contiguous(x)
        full, exact = self._dtype is torch.float32, self._exact()
        bound = GATE_FUNCTIONS[call.gate_fn].lower_bound(call.gate_scale)
        bounded = bound >= GATE_LIMIT
        wide = bound >= WIDE_LIMIT and call.qk_l2norm_eps > 0.0
        pairs = 1 if exact else min(32, self._plan.chunk) if wide else 0
        rounding = "tf32" if call.compute_dtype is torch.float16 else precision()
        gate = {"head": "scalar", "token": "scalar"}.get(call.gate, call.gate)
        return values | {
            "T": self._length, "N": 0, "pitch": self._length, "cu_seqlens": nothing, "chunk_offsets": nothing,
            "last_ptr": nothing, "BESIDE": False, "scale": call.scale,
            "gate_scale": call.gate_scale, "l2norm_eps": call.qk_l2norm_eps, "HV": self._heads,
            "GROUP": self._heads // self._key_heads, "K": self._width, "V": self._columns,
            "KP": padded(self._width), "VP": padded(self._columns), "C": self._plan.chunk, "GATE": gate,
            "FN": "log" if call.gate == "none" else call.gate_fn, "GATED": call.gate != "none", "DELTA": call.delta,
            "BETA": call.beta is not None, "SIGMOID": call.sigmoid_beta, "L2NORM": call.qk_l2norm_eps > 0.0,
            "RATE": call.A_log is not None, "BIAS": call.dt_bias is not None,
            "DBIAS": call.dt_bias is not None or call.gate == "head",
            "STATE": call.initial_state is not None, "FINAL": grad_state is not None,
            "PACKED": call.cu_seqlens is not None, "EXACT": exact, "BOUNDED": bounded and not exact, "PAIRS": pairs,
            "DT": triton_dtype(self._dtype), "PRECISION": rounding,
            "INVERSE_PRECISION": rounding if full else inverse_precision(call, self._dtype),
        }  # fmt: skip

    def _results(self) -> dict[str, Tensor]:
        """The gradients as the kernels write them, some in parts that are summed behind them."""
        call, batch, device = self._call, self._call.q.shape[0], self._call.q.device
        tokens, made = (batch, self._length, self._heads), self._scratch.result
        kept = torch.float32 if self._gathered and self._dtype is torch.float32 else self._dtype
        found = {
            "dq": made((*tokens, self._width), kept if self._gathered else call.q.dtype, device),
            "dk": made((*tokens, self._width), kept if self._gathered else call.k.dtype, device),
            "dv": made((*tokens, self._columns), call.v.dtype, device),
        }
        if call.beta is not None:
            found["dbeta"] = made(tokens, call.beta.dtype, device)
        if call.initial_state is not None:
            found["dstate"] = made((call.sequences, self._heads, self._width, self._columns), torch.float32, device)
        if call.g is None:
            return found
        channels = (self._width,) if call.gate == "channel" else ()
        found["dg"] = made((*tokens, *channels), torch.float32 if call.gate == "head" else call.g.dtype, device)
        # Chunks that there are none of write nothing.
        parts = torch.zeros if call.cu_seqlens is not None else torch.empty
        if call.dt_bias is not None or call.gate == "head":
            found["dbias"] = parts((self._chunks, self._heads, *channels), dtype=torch.float32, device=device)
        if call.A_log is not None:
            rows = self._chunks * self._rate_parts()
            found["drate"] = parts((rows, self._heads), dtype=torch.float32, device=device)
        return found

    def _rate_parts(self) -> int:
        """Programs to a chunk and head that each have a part of A_log's gradient."""
        return padded(self._width) // self._plan.keys if self._call.gate == "channel" else 1

    def _wanted(self, heads: int) -> Buffers:
        """The buffers of so many heads."""
        call, tiles, chunk = self._call, self._chunks * heads, self._plan.chunk
        keys, columns = padded(self._width), padded(self._columns)
        narrow, square, token, value, state = (
            (tiles, chunk), (tiles, chunk, chunk), (tiles, chunk, keys), (tiles, chunk, columns),
            (tiles, keys, columns),
        )  # fmt: skip
        operand = torch.float16 if self._values["INVERSE_PRECISION"] == "fp16" else torch.float32
        wanted: Buffers = {
            "qg": (token, self._dtype), "kd": (token, self._dtype), "p": (square, self._dtype),
            "s": (state, self._dtype), "d": (state, self._dtype), "z": (value, self._dtype),
            "own": (narrow, torch.float32),
        }  # fmt: skip
        if call.gate != "none":
            wanted["total"] = ((tiles, keys), torch.float32)
        if self._blocks:
            wanted["factors"] = ((tiles, 4, chunk // 16, keys), torch.float32)
            wanted["masks"] = ((chunk * chunk + 256,), self._dtype)
        if call.gate in ("head", "token"):
            wanted["dlog"] = (narrow, torch.float32)
        if call.beta is not None:
            wanted["beta"] = (narrow, torch.float32)
        if call.qk_l2norm_eps:
            wanted["rate"] = ((tiles, 2, chunk), torch.float32)
        if call.delta:
            wanted |= {"l": (square, self._dtype), "x": (square, self._dtype), "a": (square, operand)}
            wanted |= {"y": (value, self._dtype)}
            if call.gate != "none":
                wanted["kg"] = (token, self._dtype)
        return self._kept(wanted, tiles)

    def _buffers(self, heads: int) -> dict[str, Any]:
        call, nothing, made = self._call, self._call.q, self._made(heads)
        if call.delta and call.gate == "none" and "kd" in made:
            made["kg"] = made["kd"]
        for name in ("p", "l"):
            if name in made:  # what is read last is overwritten in place, by the program that reads it
                made[f"d{name}"] = made[name]
        names = "qg kg kd total factors masks lines sums p l a x beta rate s d y z own dlog dp dl done".split()
        values = {f"{name}_buffer": made.get(name, nothing) for name in names}
        results = "dq dk dv dg dbeta dstate dbias drate".split()
        return values | {f"{name}_ptr": self._found.get(name, nothing) for name in results}

    def _kept(self, wanted: Buffers, tiles: int) -> Buffers:
        """The buffers that the kernels of all phases use, of these."""
        return wanted

    def _over(self, wanted: Buffers, heads: int) -> dict[str, tuple[str, int]]:
        """Buffers of ``heads`` that lie in others or in gradients: in which, and how many bytes behind its begin."""
        return {}

    def _made(self, heads: int) -> dict[str, Tensor]:
        """The buffers, of ``heads`` that are worked on together."""
        wanted, made = self._wanted(heads), dict[str, Tensor]()
        over = self._over(wanted, heads)
        for name, (shape, dtype) in wanted.items():
            if name in self._shared:
                made[name] = self._shared[name][: shape[0]]
            elif name not in over:
                made[name] = self._scratch.empty(shape, dtype, self._call.q.device)
        for name, (host, begin) in over.items():
            shape, dtype = wanted[name]
            memory = (made[host] if host in made else self._found[host]).view(-1).view(torch.uint8)
            made[name] = memory[begin : begin + bytes_of(shape, dtype)].view(dtype).view(shape)
            if self._scratch.poison:
                made[name].fill_(float("nan"))
        return made

    def _gradients(self) -> Gradients:
        call, found = self._call, self._found
        dq, dk = (self._gather(name, x) for name, x in (("q", call.q), ("k", call.k)))
        parts = {"A_log": "drate", "dt_bias": "dbias"} | ({"g": "dbias"} if call.gate == "head" else {})
        given = {name: found[part] for name, part in parts.items() if getattr(call, name) is not None and part in found}
        sums = self._over_chunks(given)
        return (
            dq,
            dk,
            found["dv"],
            sums.get("g", found.get("dg")),
            found.get("dbeta"),
            None if call.initial_state is None else found["dstate"].to(call.initial_state.dtype),
            sums.get("A_log"),
            sums.get("dt_bias"),
        )

    def _over_chunks(self, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        """The sums of ``[chunks, ..]``, two at a time; torch's own reductions take some 10 us each."""
        totals, pairs = dict[str, Tensor](), list[tuple[Tensor, Tensor]]()
        for name, part in parts.items():
            like = getattr(self._call, name)
            totals[name] = self._scratch.result(tuple(part.shape[1:]), like.dtype, like.device)
            pairs.append((part, totals[name]))
        for n in range(0, len(pairs), 2):
            values: dict[str, Any] = {"ROWS": 128, "BLOCK": 32}
            widths = [total.numel() for _, total in pairs[n : n + 2]] + [0]
            for prefix, (part, total), width in zip(("", "other_"), (*pairs[n:], pairs[n]), widths, strict=False):
                values |= {f"{prefix}total_ptr": total, f"{prefix}rows": part.shape[0], f"{prefix}width": width}
                values["others_ptr" if prefix else "parts_ptr"] = part
            blocks = sum(-(-width // 32) for width in widths[:2])
            values["CHAINED"] = chained = n == 0 and self._chained
            options = {"launch_pdl": True} if chained else {}
            launch(self._scratch, _kernels().add_chunks, blocks, values, num_warps=4, **options)
        return totals

    @property
    def _chained(self) -> bool:
        """Whether these sums are launched before what they sum is there, and wait for it."""
        return False

    def _gather(self, name: str, x: Tensor) -> Tensor:
        """The gradient of q or k from those of the value heads."""
        partial = self._found[f"d{name}"]
        if not self._gathered:
            return partial
        gradient = self._scratch.result(tuple(x.shape), x.dtype, x.device)
        rows, keys = x.shape[0] * x.shape[1] * x.shape[2], padded(self._width)
        block = max(1, 2048 // keys)
        values = {**self._values, **tensor_arguments("x", "bthd", x), "partial": partial, "dx_ptr": gradient}
        values |= {"rows": rows, "H": self._key_heads, "BT": block}
        launch(self._scratch, _kernels().gather, -(-rows // block), values, num_warps=4)
        return gradient


@dataclass(frozen=True)
class _Kernels:
    prepare: Any
    inverse: Any
    scan: Any
    pair_gradients: Any
    through_states: Any
    gradients: Any
    gather: Any
    add_chunks: Any


@cache
def _kernels() -> _Kernels:
    """Imported where they are needed: the package is optional."""
    from .backward_gradients import add_chunks, gather, gradients, pair_gradients, through_states
    from .backward_prepare import inverse, prepare
    from .backward_scan import scan

    return _Kernels(prepare, inverse, scan, pair_gradients, through_states, gradients, gather, add_chunks)

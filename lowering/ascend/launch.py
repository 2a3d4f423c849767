"""Running emitted modules: tables, buffers and grids. Who compiles and launches a kernel is the caller's affair."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..calls import Call
from ..errors import ArgumentError
from ..ir import Dim
from ..scratch import Scratch
from ..stages import evaluate, size
from ..triton.configs import padded
from .emit import CHUNK, FIRST, chunk_module
from .kernel import SUB_CHUNK, Domain, Kernel, Kind, Module
from .prepare import Fused
from .step import step_module

_MOST_STATE = 128 * 128  # elements of the state that two Vec cores hold between them, with what they need beside it
_WIDEST_TOKEN_GATE = 128  # keys wider than this leave the one kernel that does a chunk with a gate per token no room
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Launch:
    """One kernel launch: a one-dimensional grid, the run-time arguments and the constexpr ones, by name."""

    module: Module
    kernel: Kernel
    grid: int
    arguments: Mapping[str, Tensor | int | float]
    constants: Mapping[str, int]


Launcher = Callable[[Launch], None]


def decline(width: int, columns: int, dtype: torch.dtype) -> str:
    """Why the emitted kernels do not take keys of ``width``, values of ``columns`` or operands of ``dtype``, or ''."""
    for name, n, most in (("K", width, 256), ("V", columns, 1 << 15)):
        if n > most:
            return f"{name} = {n} is more than {most}"
    if dtype not in _DTYPES:
        return f"no {dtype} kernels"
    return ""


def _check(call: Call) -> None:
    if not call.q.dtype == call.k.dtype == call.v.dtype:
        raise ArgumentError(f"q, k and v have one dtype, got {call.q.dtype}, {call.k.dtype} and {call.v.dtype}")
    if reason := decline(call.q.shape[-1], call.v.shape[-1], call.q.dtype):
        raise ArgumentError(reason)


def missing_width(call: Call) -> tuple[int, int]:
    """What K and V lack to be powers of two."""
    keys, values = (padded(x.shape[-1]) - x.shape[-1] for x in (call.q, call.v))
    return keys, values


def padded_call(call: Call) -> Call | None:
    """The call with K and V filled up to powers of two by zeros, which change no product and no decay, and of the state
    nothing but what they add to it; or None where nothing is to be filled."""
    keys, values = missing_width(call)
    if not keys and not values:
        return None
    g, state, bias = call.g, call.initial_state, call.dt_bias
    if call.gate == "channel":
        g, bias = (x if x is None else pad(x, (0, keys)) for x in (g, bias))
    state = None if state is None else pad(state, (0, values, 0, keys))
    q, k, v = pad(call.q, (0, keys)), pad(call.k, (0, keys)), pad(call.v, (0, values))
    return replace(call, q=q, k=k, v=v, g=g, initial_state=state, dt_bias=bias)


def levels(chunk: int) -> int:
    """How often blocks of SUB_CHUNK tokens double to make a chunk."""
    return (chunk // SUB_CHUNK).bit_length() - 1


def chunk_of(wish: int, gate: str, delta: bool, width: int, dtype: torch.dtype) -> int:
    """The chunk for a call: 32, 64 or 128 tokens, as it asks for, 64 where it leaves that open. With gates or the delta
    term tiles of 128 tokens have no room in UB, whose rows the compiler does not split in prologues."""
    plain = gate == "none" and not delta
    if wish > CHUNK and plain and width <= 128 and dtype is not torch.float32:
        return 2 * CHUNK
    return CHUNK // 2 if 0 < wish < CHUNK else CHUNK


def target_of_arch(arch: str) -> str:
    """The target to plan for on a device as triton-ascend names it: Ascend910B3, Ascend910_9391, Ascend910_9599."""
    return "ascend910_95" if arch.startswith("Ascend910_95") else FIRST


def column_tile(width: int, columns: int, *, alone: bool = False) -> int:
    """How many columns of the state [K, V] one task holds; ``alone``: on one Vec core, without a Cube core's pair."""
    return min(columns, _MOST_STATE // width // (2 if alone else 1), 64 if alone else 128)


def is_ahead(lanes: int, cores: int, width: int, columns: int) -> bool:
    """Whether the scan does the prologue's products, where its plan has them in it: not where it leaves core groups
    idle, which then share in them in a kernel of their own, nor where several tasks have columns of one state."""
    return lanes >= cores and column_tile(width, columns) == columns


def key_tile(width: int) -> int:
    """How many channels of a chunk a task has where channels do not meet: more would fill UB to the brim, and take the
    compiler half a minute."""
    return min(width, 64)


def run_chunks(
    call: Call,
    *,
    cores: int,
    launch: Launcher,
    outputs: str = "auto",
    narrow_update: bool = False,
    scratch: Scratch | None = None,
    target: str = FIRST,
) -> tuple[Tensor, Tensor]:
    """Linear attention over whole sequences.

    The call is as the op has it, with q, k and v of one dtype, which is that of o, and the rest in float32. ``cores``:
    how many Cube cores the device has; ``target``: what its kernels are planned for. Returns o ``[B, T, HV, V]`` and
    the final state in float32. Raises :class:`ArgumentError` where :func:`decline` has a reason.
    """
    _check(call)
    if (wide := padded_call(call)) is not None:
        results = run_chunks(
            wide, cores=cores, launch=launch, outputs=outputs, narrow_update=narrow_update, scratch=scratch,
            target=target,
        )  # fmt: skip
        return _narrowed(call, *results)
    q, v, g, gate = call.q, call.v, call.g, call.gate
    batch, length, heads, width = q.shape
    chunk = chunk_of(call.chunk_size, gate, call.delta, width, q.dtype)
    value_heads, columns = v.shape[2:]
    tables = tables_of(call.cu_seqlens, batch, length, chunk, q.device)
    chunks, sequences = tables["chunks"].numel() // 2, tables["first_chunk"].numel() - 1
    if g is not None and gate != "channel" and width > _WIDEST_TOKEN_GATE:
        g = (g if gate == "token" else g.expand(batch, length, -1)).unsqueeze(-1).expand(-1, -1, -1, width)
        gate = "channel"
        bias = call.dt_bias
        call = replace(call, dt_bias=None if bias is None else bias.unsqueeze(-1).expand(-1, width))
    row = (gate, call.delta, call.beta is not None)
    tile = column_tile(width, columns)
    ahead = is_ahead(sequences * value_heads, cores, width, columns)
    module = chunk_module(
        *row, fused=Fused.of(call), outputs=outputs, narrow_update=narrow_update, target=target, ahead=ahead
    )
    constants = {"H": heads, "HV": value_heads, "C": chunk, "K": width, "V": columns, "BV": tile, "R": SUB_CHUNK}
    constants |= {"LEVELS": levels(chunk), "DELTA": int(call.delta), "INITIAL": int(call.initial_state is not None)}
    o = torch.empty(batch, length, value_heads, columns, dtype=v.dtype, device=v.device)
    state = torch.empty(sequences, value_heads, width, columns, dtype=torch.float32, device=v.device)
    values: dict[str, Any] = {
        **_common(call, o, state),
        "tokens": batch * length,
        **tables,
        **turned_gates(g, call.beta, gate, batch, length),
    }
    tiles = chunks * value_heads
    values |= buffers_of(module, constants, tiles, cores, v, scratch or Scratch())
    for kernel in module.kernels:
        launch_chunks(module, kernel, tiles, sequences * value_heads, values, constants, cores, launch)
    return o, state


def launch_chunks(
    module: Module,
    kernel: Kernel,
    tiles: int,
    lanes: int,
    values: Mapping[str, Any],
    constants: Mapping[str, int],
    cores: int,
    launch: Launcher,
) -> None:
    """Launch a kernel over ``tiles`` chunks of heads, or ``lanes`` sequences of heads."""
    columns = constants["V"]
    block = constants["BV"] if kernel.cube else column_tile(constants["K"], columns, alone=True)
    count = {
        Domain.SUB_CHUNKS: tiles * (constants["C"] // SUB_CHUNK),
        Domain.CHUNKS: tiles,
        Domain.CHUNK_COLUMNS: tiles * (columns // block),
        Domain.CHUNK_KEYS: tiles * (constants["K"] // key_tile(constants["K"])),
        Domain.LANE_COLUMNS: lanes * (columns // block),
    }[kernel.domain]
    constants = {**constants, "BV": block, "BK": key_tile(constants["K"])}
    parts = columns // block if any(argument.name == "part" for argument in kernel.arguments) else 1
    for part in range(parts):
        _launch(module, kernel, count // parts, {**values, "part": part}, constants, cores, launch)


def buffers_of(
    module: Module, constants: Mapping[str, int], tiles: int, cores: int, like: Tensor, scratch: Scratch
) -> dict[str, Tensor]:
    """What lies between the kernels, by pointer name: a place for every tile (chunk and head), or for every core."""
    found: dict[str, Tensor] = {}
    for buffer in module.scratch:
        rows, cols = (_elements(dim, tuple(constants.items())) for dim in buffer.shape)
        if buffer.per_core and buffer.shape[1] == "V":
            cols = constants["BV"]
        dtype = like.dtype if buffer.kind is Kind.IO else torch.float32
        count = (cores if buffer.per_core else tiles) * rows * cols
        found[f"{buffer.name}_ptr"] = scratch.empty((count,), dtype, like.device)
    return found


def _common(call: Call, o: Tensor, final_state: Tensor) -> dict[str, Any]:
    """What kernels over whole sequences and of a step are both given."""
    initial = call.initial_state
    parameters = {"A_log_ptr": call.A_log, "dt_bias_ptr": call.dt_bias}
    return {
        **{name: x.contiguous() for name, x in parameters.items() if x is not None},
        "q_ptr": call.q.contiguous(),
        "k_ptr": call.k.contiguous(),
        "v_ptr": call.v.contiguous(),
        "o_ptr": o,
        "initial_state_ptr": final_state if initial is None else initial.contiguous(),
        "final_state_ptr": final_state,
        "scale": call.scale,
        "gate_scale": call.gate_scale,
        "l2norm_eps": call.qk_l2norm_eps,
    }


def _narrowed(call: Call, o: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The columns and rows of results that the call has."""
    width, columns = call.q.shape[-1], call.v.shape[-1]
    return o[..., :columns].contiguous(), state[..., :width, :columns].contiguous()


def run_step(call: Call, *, cores: int, launch: Launcher, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """T tokens of every request, one after the other. The call is as the op has it, not packed, with q, k and v of one
    dtype and the rest in float32. ``out`` may be the initial state, which is updated; with state indices it is."""
    _check(call)
    if (wide := padded_call(call)) is not None:
        o, new = _narrowed(call, *run_step(wide, cores=cores, launch=launch))
        return o, new if out is None else out.copy_(new)
    batch, length, heads, width = call.q.shape
    value_heads, columns = call.v.shape[2:]
    tile = column_tile(width, columns, alone=True)
    pool = call.state_indices is not None
    module = step_module(call.gate, call.delta, call.beta is not None, Fused.of(call), pool=pool)
    o = torch.empty_like(call.v, memory_format=torch.contiguous_format)
    if out is None:
        out = torch.empty(batch, value_heads, width, columns, dtype=torch.float32, device=call.v.device)
    g = call.g.expand(batch, length, value_heads) if call.g is not None and call.gate == "head" else call.g
    values = _common(call, o, out)
    values |= {f"{name}_ptr": x.contiguous() for name, x in (("g", g), ("beta", call.beta)) if x is not None}
    if call.state_indices is not None:
        values |= {"state_indices_ptr": call.state_indices.to(torch.int32).contiguous(), "slots": out.shape[0]}
    initial = int(call.initial_state is not None)
    constants = {"H": heads, "HV": value_heads, "K": width, "V": columns, "BV": tile, "INITIAL": initial}
    constants["TOKENS"] = length
    count = batch * value_heads * (columns // tile)
    _launch(module, module.kernels[0], count, values, constants, cores, launch)
    return o, out


def _launch(
    module: Module,
    kernel: Kernel,
    tasks: int,
    values: Mapping[str, Any],
    constants: Mapping[str, int],
    cores: int,
    launch: Launcher,
) -> None:
    """Launch on as many cores as there is work for; a kernel without products runs on the Vec cores, two a group."""
    if not tasks:
        return
    values = {**values, "tasks": tasks}
    spare = values["q_ptr"]  # stands for what the row does not have and the kernel does not read
    arguments = {a.name: values.get(a.name, 0.0 if a.kind is Kind.NUMBER else spare) for a in kernel.arguments}
    grid = min(tasks, cores if kernel.cube else 2 * cores)
    launch(Launch(module, kernel, grid, arguments, {name: constants[name] for name in kernel.constants}))


def tables_of(
    cu_seqlens: Tensor | None, batch: int, length: int, chunk: int, device: torch.device
) -> dict[str, Tensor]:
    """Where sequences and chunks are, computed on the device: no length is read on the host.

    ``cu_seqlens`` ``[N + 1]``: bounds in the tensors with batch and tokens taken as one; ``chunks`` ``[slots * 2]``: of
    every chunk the first token, and the tokens to its sequence's end; ``first_chunk`` ``[N + 1]``. There are as many
    slots as packed sequences of that many tokens can have chunks; those that are left over have no tokens.
    """
    if cu_seqlens is None:
        bounds, slots = torch.arange(batch + 1, device=device) * length, batch * -(-length // chunk)
    else:
        bounds, slots = cu_seqlens.long(), batch * length // chunk + cu_seqlens.numel() - 1
    starts, ends = bounds[:-1], bounds[1:]
    last = ((ends - starts + chunk - 1) // chunk).cumsum(0)
    first = pad(last, (1, 0))
    slot = torch.arange(slots, device=device)
    sequence = torch.searchsorted(last, slot, right=True).clamp(max=max(starts.numel() - 1, 0))
    token = starts[sequence] + (slot - first[sequence]) * chunk
    chunks = torch.stack([token, ends[sequence] - token], 1)
    chunks = torch.where((slot < first[-1])[:, None], chunks, 0)
    tables = {"cu_seqlens": bounds, "chunks": chunks.flatten(), "first_chunk": first}
    return {name: table.to(torch.int32) for name, table in tables.items()}


def turned_gates(g: Tensor | None, beta: Tensor | None, gate: str, batch: int, length: int) -> dict[str, Tensor]:
    """Gates per token as [HV, tokens]: loads along tokens with a stride are many times slower than these copies."""
    turned: dict[str, Tensor] = {}
    if g is not None and gate == "head":
        g = g.expand(batch, length, -1)
    for name, x in (("g", g), ("beta", beta)):
        if x is not None:
            turned[f"{name}_ptr"] = x.contiguous() if x.dim() == 4 else x.flatten(0, 1).t().contiguous()
    return turned


@cache
def _elements(dim: Dim, constants: tuple[tuple[str, int], ...]) -> int:
    return evaluate(size(dim), dict(constants))

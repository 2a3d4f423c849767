"""The entry points of the lowering: one row of the family on real tensors.

They take prepared calls: operands of one dtype, float32 or float64, of which they compute in it; ``gate_fn`` is one of
:data:`~kdacompile.lowering.gates.FORMS`, since every other gate function has been applied, and so has sigmoid to beta.
Whether shapes and options fit was checked by the op.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from kdacompile.compat.dispatcher import is_functorch_wrapped_tensor
from kdacompile.containment import contain

from .calls import RECURRENT, Call
from .cpu import Launch, bounds_of, prepare_recurrence
from .errors import ArgumentError
from .executor import Executable
from .gates import FORMS
from .layout import Layout, dense_layout, packed_layout, sequence_bounds
from .linear_attention import linear_attention_program

MIN_CHUNK, MAX_CHUNK = 16, 256

# Measured on a CPU over K = 16 .. 128, 1 to 16 heads, all gates: 32 was the fastest or within a tenth of it. The
# products inside a chunk grow with its length and the number of scan steps falls with it. On an accelerator a step is
# a launch, so longer chunks win.
CPU_CHUNK, DEVICE_CHUNK = 32, 64


@cache
def executable(gate: str, delta: bool, beta: bool, gate_form: str, form: str) -> Executable:
    """The compiled program of one row, made once per process."""
    return Executable(linear_attention_program(gate, delta, beta=beta, gate_form=gate_form, form=form))


def choose_chunk(chunk_size: int, length: int, device: torch.device) -> int:
    """The chunk length to run with; always a power of two.

    A given size is a wish: chunking does not change the function, so it is rounded up to a power of two within
    [MIN_CHUNK, MAX_CHUNK]. 0 leaves the choice to the lowering. Short sequences get a chunk no longer than they are.
    """
    if chunk_size < 0:
        raise ArgumentError(f"chunk_size must be 0 or positive, got {chunk_size}")
    wish = chunk_size or (CPU_CHUNK if device.type == "cpu" else DEVICE_CHUNK)
    chunk = 1 << (min(max(wish, MIN_CHUNK), MAX_CHUNK) - 1).bit_length()
    return min(chunk, 1 << max(length - 1, 0).bit_length())


def run_linear_attention(call: Call) -> tuple[Tensor, Tensor]:
    """Linear attention over a sequence; see ``linear_attention.py`` for the mathematics.

    Returns o ``[B, T, HV, V]`` and the final state ``[N, HV, K, V]`` in the call's dtype, both contiguous and fresh.
    cu_seqlens, if any, is on the device of the others; :class:`ArgumentError` where its values are wrong.

    On a CPU and without gradients this is the C kernel of the recurrence, which knows no chunks, if the machine can
    compile it; else :func:`run_executor`.
    """
    _check(call)
    chunk = choose_chunk(call.chunk_size, call.q.shape[1], call.q.device)
    if call.q.shape[1] == 0:
        return _nothing(call)
    launch = None if is_any_watched(call.recurrent) else _launch_on_cpu(call)
    return run_executor(call, chunk) if launch is None else launch()


def run_executor(call: Call, chunk: int) -> tuple[Tensor, Tensor]:
    """The same by the torch executor, which autograd and ``torch.func`` follow, in chunks of ``chunk`` tokens."""
    results = _run(call, "chunk", chunk)
    watched = is_any_watched(call.recurrent)
    if watched or call.q.device.type != "cpu" or all(bool(x.sum().isfinite()) for x in results):
        return results
    return _as_tokens_have_them(call, chunk)


def run_linear_attention_step(call: Call, *, overwrite: bool = False) -> tuple[Tensor, Tensor]:
    """One token (T = 1) through the recurrence itself; results as of :func:`run_linear_attention`.

    With ``overwrite`` the state returned may be ``initial_state``, overwritten once everything else was read; or not.
    """
    _check(call)
    launch = None if is_any_watched(call.recurrent) else _launch_on_cpu(call, overwrite=overwrite)
    return _run(call, "token", 1) if launch is None else launch()


def run_step_in_pool(call: Call) -> Tensor | None:
    """o of one token of requests whose states lie in a pool, which is overwritten; None where no kernel does that."""
    _check(call)
    launch = None if is_any_watched(call.recurrent) else _launch_on_cpu(call, overwrite=True)
    return None if launch is None else launch()[0]


def _launch_on_cpu(call: Call, *, overwrite: bool = False) -> Launch | None:
    """The C kernel on its arguments; None where it does not run such calls, and after an error of ours."""
    if call.q.device.type != "cpu":
        return None
    bounds = bounds_of(call)  # wrong ones are the caller's error
    return contain("choosing a kernel", lambda: prepare_recurrence(call, bounds, overwrite=overwrite), lambda _: None)


def _check(call: Call) -> None:
    if call.gate_fn not in FORMS or call.q.dtype not in (torch.float32, torch.float64):
        raise ArgumentError(f"the call is not prepared: {call.gate_fn!r}, {call.q.dtype}")


def _run(call: Call, form: str, chunk: int) -> tuple[Tensor, Tensor]:
    eps = call.qk_l2norm_eps
    normed = replace(call, q=l2norm(call.q, eps), k=l2norm(call.k, eps)) if eps else call
    run = executable(call.gate, call.delta, call.beta is not None, call.gate_fn, form)
    return execute(run, normed, layout_of(call, chunk))


def _as_tokens_have_them(call: Call, chunk: int) -> tuple[Tensor, Tensor]:
    """Results that are not all finite. What a token must not see is a product with zero in its chunk, which NaN and
    infinities survive: the recurrence has numbers where the chunks have none. Nothing that is not finite has a part in
    those, so that they are, to the bit, the chunks' with zeros in its place.
    """
    tokens = _token_by_token(call)
    zeroed = {name: x.where(x.isfinite() | (x.isneginf() & (name == "g")), 0.0) for name, x in _per_token(call).items()}
    chunks = _run(replace(call, **zeroed), "chunk", chunk)
    one, other = (x.where(x.isfinite() & y.isfinite(), y) for x, y in zip(chunks, tokens, strict=True))
    return one, other


def _token_by_token(call: Call) -> tuple[Tensor, Tensor]:
    """By the recurrence itself."""
    o, finals = torch.empty_like(call.v, memory_format=torch.contiguous_format), list[Tensor]()
    for parts, state in zip(*parts_of(call), strict=True):
        for part in parts:
            o[:, part], state = run_tokens(part_of(call, part, state))
        finals.append(state)
    return o, torch.cat(finals)


def run_tokens(call: Call) -> tuple[Tensor, Tensor]:
    """:func:`run_linear_attention` token by token."""
    return _run(call, "token", 1)


def parts_of(call: Call) -> tuple[list[list[slice]], Sequence[Tensor]]:
    """Each sequence's tokens, some at a time, since the states after all of them would fill the memory, and its
    initial state.
    """
    _, (shape, dtype) = call.results
    initial = call.v.new_zeros(shape, dtype=dtype) if call.initial_state is None else call.initial_state
    length = call.q.shape[1]
    bounds = [0, length] if call.cu_seqlens is None else sequence_bounds(call.cu_seqlens, length)
    parts = [
        [slice(first, min(first + CPU_CHUNK, end)) for first in range(start, end, CPU_CHUNK)]
        for start, end in pairwise(bounds)
    ]
    return parts, initial.split(len(initial) // len(parts))


def part_of(call: Call, part: slice, state: Tensor) -> Call:
    """Some tokens of a call, after this state."""
    some = {name: x[:, part] for name, x in _per_token(call).items()}
    return replace(call, initial_state=state, cu_seqlens=None, **some)


def _per_token(call: Call) -> dict[str, Tensor]:
    """The operands that have a row for every token."""
    named = zip(RECURRENT[:-1], call.recurrent, strict=False)
    return {name: x for name, x in named if x is not None and x.dim() > 1}


def layout_of(call: Call, chunk: int) -> Layout:
    """How the tokens of a call are cut into chunks."""
    batch, length, heads, _ = call.v.shape
    if call.cu_seqlens is None:
        return dense_layout(batch, length, heads, chunk)
    return packed_layout(call.cu_seqlens, length, heads, chunk)


def execute(run: Executable, call: Call, layout: Layout) -> tuple[Tensor, Tensor]:
    """o and the final state by the compiled program of the call's row; q and k are normalised."""
    tensors = dict(zip(RECURRENT, call.recurrent, strict=True))
    if call.gate == "head" and call.g is not None:
        tensors["g"] = call.g.expand(layout.batch, layout.length, -1)
    dims = {"C": layout.chunk, "K": call.q.shape[-1], "V": call.v.shape[-1]}
    out = run(tensors, layout, dims=dims, dtype=call.q.dtype, scalars={"scale": call.scale})
    return out["o"], out["final_state"]


def l2norm(x: Tensor, eps: float) -> Tensor:
    """``x / sqrt(sum(x * x) + eps)`` over the last dimension: a zero row stays zero. ``x`` itself if eps is 0."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps) if eps else x


def _nothing(call: Call) -> tuple[Tensor, Tensor]:
    """T = 0: no outputs, and the state as it was."""
    _, (shape, dtype) = call.results
    o, state = call.v.new_zeros(call.v.shape), call.initial_state
    return o, o.new_zeros(shape, dtype=dtype) if state is None else state.clone(memory_format=torch.contiguous_format)


def is_any_watched(tensors: Iterable[Tensor | None]) -> bool:
    """Whether autograd, ``torch.func`` or a tensor subclass (fake tensors) looks at one of these tensors: a kernel that
    is given its address would leave that out.
    """
    recorded = torch.is_grad_enabled()
    for x in tensors:
        if x is None:
            continue
        if type(x) not in _PLAIN or (recorded and x.requires_grad) or is_functorch_wrapped_tensor(x):
            return True
    return False


_PLAIN = (Tensor, torch.nn.Parameter)

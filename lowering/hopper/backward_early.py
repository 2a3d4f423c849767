"""Gluon: the gradients of chunks whose states are known begin while the scan goes on, if there is one sequence.

The scan takes one chunk after another, in both directions, and the forward half is over first: its multiprocessors
would wait for the other half. So both say which chunks are done, every few of them where they are many, and the kernel
behind it starts once all of the scan's blocks are at work. It takes chunks in the order in which both directions are
through with them, from the "middle" outwards where the scan leaves multiprocessors idle, else from the "end", where the
reverse half began.

What it writes may lie where the scan still reads, see ``HopperBackward._made``. So a chunk waits for all heads, and
from the "end" for more of the reverse half: P lies, at half the size, in the gradients of gates.
"""

# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import progress
from .common import barrier, pinned, previous_is_over

EVERY = gl.constexpr(progress.EVERY)
SHORT = gl.constexpr(progress.SHORT)


@gluon.jit
def _every(chunks):
    """After how many chunks each direction says so: the power of two."""
    return gl.where(chunks > SHORT, EVERY, 0)


@gluon.jit
def rounds_of(T):
    """How often each direction does."""
    chunks = (T + 63) // 64
    return ((chunks - 1) >> _every(chunks)) + 1


@gluon.jit
def say_done(done, n, count, EARLY: gl.constexpr):
    """That a block's first ``n`` chunks of ``count`` are in memory, behind a barrier after the last store."""
    if EARLY != "":
        every = _every(count)
        if (n > 0) & (((n >> every) << every == n) | (n == count)):
            gl.atomic_add(done + ((n - 1) >> every), 1, sem="release", scope="gpu")


@gluon.jit
def nothing_done(done, pid, T):
    """Of every block of the kernel before the scan."""
    rounds = rounds_of(T)
    gl.store(done + 2 * pid, 0, mask=pid < rounds)
    gl.store(done + 2 * pid + 1, 0, mask=pid < rounds)


@gluon.jit
def outlast_the_scan(pid):
    """At the end of a kernel that begins beside a scan of chunks before its own, or the gradients of heads before its
    own: it is not over before that."""
    if pid == 0:
        previous_is_over()


@gluon.jit
def _in_turn(n, chunks, EARLY: gl.constexpr):
    """The chunk that is n-th."""
    if EARLY == "end":
        chunk = chunks - 1 - n
    else:
        middle = chunks // 2
        chunk = middle + gl.where(n % 2 == 0, n // 2, -1 - n // 2)
        chunk = gl.where(n < 2 * middle, chunk, n)
    return chunk


@gluon.jit
def _await(flag, count):
    seen = gl.atomic_add(flag, 0, sem="acquire", scope="gpu")
    while seen < count:
        gl.inline_asm_elementwise("nanosleep.u32 500; // $0", "=r", [], gl.int32, False, 1)
        seen = gl.atomic_add(flag, 0, sem="acquire", scope="gpu")


@gluon.jit
def early_tile(T, first_head, HP: gl.constexpr, EARLY: gl.constexpr):
    """Of a block: its tile, its chunk and its head, one of HP from ``first_head`` on. Made anew where it is called."""
    pid = pinned(gl.program_id(0)).to(gl.int64)
    chunk = _in_turn(pid // HP, (T + 63) // 64, EARLY)
    own = pid % HP
    return chunk * HP + own, chunk, first_head + own


@gluon.jit
def await_states(done, T, blocks, HP: gl.constexpr, EARLY: gl.constexpr):
    """Wait for the scan of the block's chunk, of which ``blocks`` go in each direction.

    The later half of the chunks waits for the whole scan, so that this kernel is not over before it.
    """
    n = gl.program_id(0) // HP
    chunks = (T + 63) // 64
    if 2 * n < chunks:
        chunk = _in_turn(n, chunks, EARLY)
        forward = chunk
        reverse = chunk
        if EARLY == "end":
            forward = chunks - 1 + 0 * chunk
            reverse = gl.maximum(2 * chunk - chunks, 0)
        every = _every(chunks)
        _await(done + (forward >> every), blocks)
        _await(done + rounds_of(T) + ((chunks - 1 - reverse) >> every), blocks)
        barrier()
    else:
        previous_is_over()

"""From a function and a call to its replacement: captured, rewritten, written down, compared, remembered.

A function is lifted for one call pattern if

1. what it is can be pinned down (``identity``),
2. at several batches and lengths its graph, rewritten by the same pass and the same proof as any model's graph, is one
   and the same straight line of code around the semantic op (``capture``, ``template``),
3. that code gives what the function gives at every length at which the function could change its mind (``verify``),
   and is what the function is captured as where it does what it did at no length of 2 (``branches.undecided``);
4. under autocast, all of this holds without it, and what is compared there agrees too (``autocast``).
"""

from __future__ import annotations

import functools
import hashlib
import linecache
import logging
import math
import types
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from kdacompile import compat
from kdacompile.capture import autocast, library, store, template, verify
from kdacompile.capture import replacement as namespace
from kdacompile.capture.branches import FARTHEST, does_other_than, undecided
from kdacompile.capture.calls import Call, Sizes, TensorArg, length_of, open_dimensions
from kdacompile.capture.concolic import Concolic, Point
from kdacompile.capture.documented import Documented
from kdacompile.capture.draft import Captured, bound, capture, turning_lengths
from kdacompile.capture.errors import NeverRuns, Unliftable, WrongLayout
from kdacompile.capture.identity import Identity
from kdacompile.capture.probes import roles, weakened
from kdacompile.capture.store import Verdict
from kdacompile.lowering.cpu import left_uncompiled
from kdacompile.ops.definitions import linear_attention
from kdacompile.patterns.engine import deadline
from kdacompile.patterns.engine.evaluate import one_thread
from kdacompile.report.findings import Match
from kdacompile.report.report import match_from_dict
from kdacompile.report.source import LIFT
from kdacompile.settings import Settings
from kdacompile.store.disk import source_fingerprint

log = logging.getLogger(__name__)

MANY_TURNS = 8
"""Turns of a loop up to which a function that nobody has proven yet is rather captured as it is."""


@dataclass(frozen=True)
class Lifted:
    """A replacement ready to be called with the call's tensors, in order."""

    run: Callable[..., Any]
    verdict: Verdict

    @property
    def matches(self) -> tuple[Match, ...]:
        return tuple(match_from_dict(**match) for match in self.verdict.matches)


class Lifts:
    """Verdicts of this process, backed by those on disk."""

    def __init__(self) -> None:
        self.known: dict[str, Lifted | Verdict] = {}

    def find(
        self,
        fn: types.FunctionType,
        identity: Identity,
        call: Call,
        settings: Settings,
        *,
        lengths_vary: bool,
        fix: bool = False,
    ) -> tuple[Lifted, Call]:
        """The replacement for ``fn`` under ``call``, and which dimensions it leaves open; raises ``Unliftable`` where
        there is none.

        ``lengths_vary``: calls of other lengths will follow, so that it is worth proving for a short one, too. ``fix``:
        see ``open_dimensions``.
        """
        reason = "no layout of its arguments fits"
        for opened in open_dimensions(call, fix=fix):
            key = _key(identity, opened, settings)
            if not (key in self.known or lengths_vary or store.has(key) or _pays(call, opened, identity)):
                reason = "a length this short is captured faster"
                continue
            attempt = functools.partial(prove, fn, identity, opened, settings)
            found = self.settled(key, fn.__qualname__, source_of(fn), settings.deadline, attempt)
            if isinstance(found, Lifted):
                return found, opened
            if not found.wrong_layout:
                reason = found.reason
                break
        raise Unliftable(reason)

    def find_library(self, fn: Callable[..., Any], documented: Documented, call: Call, settings: Settings) -> Lifted:
        """The replacement for a library's function, told by its documented signature; raises ``Unliftable``."""
        opened = library.open_dimensions(documented, call)
        text = "\n".join([library.version(fn), opened.text, repr(settings.disable), source_fingerprint()])
        key = hashlib.sha256(text.encode()).hexdigest()[:32]

        def attempt() -> Verdict:
            with autocast.uncached(opened.autocast):
                return library.prove(fn, documented, opened, lambda text: load("draft", Verdict("", "", text)).run)

        found = self.settled(key, library.name_of(fn), library.source_of(fn), settings.deadline, attempt)
        if isinstance(found, Lifted):
            return found
        raise Unliftable(found.reason)

    def settled(
        self, key: str, name: str, source: str, seconds: float, attempt: Callable[[], Verdict]
    ) -> Lifted | Verdict:
        """What is known, the verdict on disk, or a new one."""
        if key not in self.known:
            self.known[key] = _settle(key, name, source, seconds, attempt)
        return self.known[key]

    def known_by(self, key: str) -> Lifted | None:
        """The replacement that code under this key belongs to."""
        found = self.known.get(key)
        return found if isinstance(found, Lifted) else None


def _pays(call: Call, opened: Call, identity: Identity) -> bool:
    """True if proving is worth its time: the length is open already, or so many turns would be unrolled."""
    length = length_of(call, opened)
    turns = length.now // max(1, _chunk(identity.numbers | call.numbers()))
    return length.symbolic or turns > MANY_TURNS


def _chunk(numbers: AbstractSet[int]) -> int:
    """What a function that mentions these numbers takes for a chunk; 0 if it goes token by token."""
    return max((number for number in numbers if 8 <= number <= verify.LARGEST_CHUNK), default=0)


def _settle(key: str, name: str, source: str, seconds: float, prove: Callable[[], Verdict]) -> Lifted | Verdict:
    """The verdict on disk, or a new one."""
    verdict = store.load(key)
    if verdict is None:
        try:
            with deadline.within(seconds):
                verdict = prove()
        except deadline.OutOfTime as error:
            return Verdict(name, source, reason=error.reason)  # not for other processes, which may be given longer
        except torch.OutOfMemoryError:  # or have more memory
            return Verdict(name, source, reason="memory runs out while it is compared")
        except Unliftable as error:
            verdict = Verdict(name, source, reason=error.reason, wrong_layout=isinstance(error, WrongLayout))
        store.save(key, verdict)
    # A verdict on disk may name another checkout's file, or a line from before an edit elsewhere in it.
    here = replace(verdict, source=source, matches=tuple({**match, "source": source} for match in verdict.matches))
    return load(key, here) if here.text else here


def _key(identity: Identity, call: Call, settings: Settings) -> str:
    policy = (settings.precision, settings.verify, settings.disable)
    ambient = (torch.get_default_dtype(), torch.get_default_device())  # what tensors made from nothing turn out as
    text = "\n".join([identity.digest, call.text, repr(policy), repr(ambient), source_fingerprint()])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def source_of(fn: types.FunctionType) -> str:
    return f"{fn.__code__.co_filename}:{fn.__code__.co_firstlineno}"


def load(key: str, verdict: Verdict) -> Lifted:
    """Compile a verdict's text; errors and profiles show it under a name of its own."""
    filename = f"{LIFT} {key}>"
    scope = dict(vars(namespace))
    exec(compile(verdict.text, filename, "exec"), scope)
    linecache.cache[filename] = (len(verdict.text), None, verdict.text.splitlines(keepends=True), filename)
    return Lifted(scope[template.NAME], verdict)


@dataclass(frozen=True)
class _Proof:
    """What is known of a function once it was captured, rewritten and compared."""

    call: Call
    """With as few heads as it was compared with."""
    captured: list[Captured]
    seen: list[Captured]
    text: str
    roles: dict[int, str]
    concolic: Concolic
    points: list[Point]
    """Where it was captured."""
    agreed: verify.Agreement
    modulus: int | None

    @property
    def middle(self) -> int:
        """A length that the function takes."""
        return self.agreed.taken[len(self.agreed.taken) // 2]


def prove(fn: types.FunctionType, identity: Identity, call: Call, settings: Settings) -> Verdict:
    """Capture, rewrite and compare; raises ``Unliftable`` where that does not come out."""
    numbers = identity.numbers | call.numbers()
    with autocast.off(call.autocast):
        proof = _proven(fn, identity, call, numbers, settings)
    text, modulus = proof.text, proof.modulus
    dtypes = _dtypes_under_autocast(fn, proof) if call.autocast else []
    if dtypes or modulus:
        text = template.write(proof.captured, call, numbers, modulus, () if modulus else proof.seen, dtypes)
    if call.autocast:
        _compare_under_autocast(fn, proof, load("draft", Verdict("", "", text)).run)
    return Verdict(
        fn.__qualname__,
        source_of(fn),
        text,
        matches=tuple(_as_data(match, fn) for match in proof.captured[-1].matches),
        lengths=tuple(proof.agreed.taken),
        max_error=proof.agreed.error,
        modulus=modulus,
        tokens=next((i, x.dims.index("T")) for i, (_, x) in enumerate(call.tensors()) if "T" in x.dims),
    )


def _proven(
    fn: types.FunctionType, identity: Identity, call: Call, numbers: AbstractSet[int], settings: Settings
) -> _Proof:
    tried = verify.lengths(numbers)
    captured, text, seen = captures(fn, call, numbers, settings)
    last = captured[-1]
    found = weakened(last.graph, roles(last.graph), last.sizes["T"])
    turning = sorted(turning_lengths(captured))
    if turning and turning[-1] > FARTHEST:
        raise Unliftable(f"its masks turn at {turning[-1]} tokens, more than can be tried")
    tried = sorted({*tried, *turning})
    other = load("draft", Verdict("", "", text)).run
    points = [(verify.BATCHES[0], each.sizes["T"]) for each in seen]
    with left_uncompiled():
        narrow, concolic, agreed = _compared(fn, identity, call, _Comparison(other, found, tried, points))
    further = undecided(concolic.runs, points)
    if turning and turning[-1] > max(length for _, length in points):
        further.append((verify.BATCHES[0], turning[-1]))
    for batch, length in further:
        there = capture(fn, call, {"B": batch, "T": length}, settings, captured)
        if template.write([*captured, there], call, numbers, seen=seen) != text:
            raise Unliftable("what is left of it differs with the length")
    modulus = _modulus(agreed.tried, agreed.taken, numbers)
    return _Proof(narrow, captured, seen, text, found, concolic, [*points, *further], agreed, modulus)


@dataclass(frozen=True)
class _Comparison:
    """What a function is compared with, on what, and where."""

    other: Callable[..., Any]
    roles: dict[int, str]
    tried: list[int]
    points: list[Point]

    def of(self, fn: types.FunctionType, identity: Identity, call: Call) -> tuple[Concolic, verify.Agreement]:
        """Results at many lengths, and gradients; raises ``Unliftable`` unless they agree."""
        concolic = Concolic(fn, identity)
        agreed = verify.compare_everywhere(concolic, self.other, call, self.roles, self.tried, self.points)
        middle = agreed.taken[len(agreed.taken) // 2]
        verify.compare_gradients(bound(fn, call), self.other, call, self.roles, middle, verify.BATCHES[0])
        return concolic, agreed


def _compared(
    fn: types.FunctionType, identity: Identity, call: Call, comparison: _Comparison
) -> tuple[Call, Concolic, verify.Agreement]:
    """The call that the function was compared with, what it did, and how the two agree.

    On the CPU, if the call's tensors are elsewhere: there no kernels are compiled for it, and small operators take less
    time. What an operator computes is the same everywhere, so that settles it for a function that never looks at where
    its tensors are. Any other is compared where they are.
    """
    narrow = _fewer_heads(call)
    for given in (narrow, call) if _on_host(call) != call else ():
        try:
            with one_thread():
                concolic, agreed = comparison.of(fn, identity, _on_host(given))
        except (*compat.RUN_ERRORS, Unliftable) as error:
            log.info("%s does not run on the CPU as it would elsewhere: %s", fn.__qualname__, error)
            continue
        if not concolic.looks_at_devices():
            return given, concolic, agreed
        log.info("%s looks at where its tensors are, and is compared there", fn.__qualname__)
        break
    try:
        return narrow, *comparison.of(fn, identity, narrow)
    except (*compat.RUN_ERRORS, NeverRuns):  # it knows its own number of heads
        return call, *comparison.of(fn, identity, call)


def _on_host(call: Call) -> Call:
    return call.map_tensors(lambda _, tensor: replace(tensor, device="cpu"))


def _dtypes_under_autocast(fn: types.FunctionType, proof: _Proof) -> list[torch.dtype | None]:
    with autocast.uncached(proof.call.autocast):
        return verify.dtypes_of_results(bound(fn, proof.call), proof.call, proof.roles, proof.middle)


def _compare_under_autocast(fn: types.FunctionType, proof: _Proof, other: Callable[..., Any]) -> None:
    """Raises ``Unliftable`` unless the two agree under autocast too, as far as roundings to 16 bits let it be seen,
    and the function decides everything there as where it was captured.
    """
    concolic, before = proof.concolic, list(proof.concolic.runs)
    with autocast.uncached(proof.call.autocast):
        verify.compare_everywhere(concolic, other, proof.call, proof.roles, proof.agreed.taken, proof.points)
        verify.compare_gradients(bound(fn, proof.call), other, proof.call, proof.roles, proof.middle, verify.BATCHES[0])
    captured = [run for run in before if run.point in proof.points]
    if does_other_than(concolic.runs[len(before) :], captured):
        raise Unliftable("what it does depends on a dtype, which autocast changes")


def captures(
    fn: types.FunctionType, call: Call, numbers: AbstractSet[int], settings: Settings
) -> tuple[list[Captured], str, list[Captured]]:
    """The rewritten function at three sizes, what they have in common as text, and the function at all sizes tried.

    Within a chunk, over an edge, at whole chunks; where a single chunk is rewritten otherwise than several, at more
    than one; and where the function takes whole chunks only, at those.
    """
    chunk = _chunk(numbers)
    plans = [(5, chunk + 3, 3 * chunk), (2 * chunk + 5, chunk + 3, 5 * chunk), (chunk, 2 * chunk, 5 * chunk)]
    known: dict[int, Captured] = {}
    failure: Exception | None = None
    for plan in plans if chunk else [(3, 6, 11)]:
        try:
            captured = _alike(fn, call, plan, chunk, settings, known)
        except compat.RUN_ERRORS as error:
            failure = WrongLayout(f"it does not run on stand-ins: {error}")
            continue
        try:
            seen = list(known.values())
            return captured, template.write(captured, call, numbers, seen=seen), seen
        except Unliftable as error:
            failure = error
    assert failure is not None
    raise failure


def _alike(
    fn: types.FunctionType,
    call: Call,
    plan: tuple[int, ...],
    chunk: int,
    settings: Settings,
    known: dict[int, Captured],
) -> list[Captured]:
    """The rewritten function at the sizes of a plan, up to the first that is unlike the others.

    ``known``: what was captured already, by length. Raises ``Unliftable`` if more chunks have more ops: each is
    recognised by itself then, whatever the plan.
    """
    captured: list[Captured] = []
    for sizes in _sizes(plan):
        length = sizes["T"]
        if length not in known or known[length].sizes != sizes:
            known[length] = capture(fn, call, sizes, settings, known.values())
        captured.append(known[length])
        if chunk and len({len(each.matches) for each in known.values() if each.sizes["T"] > chunk}) > 1:
            raise Unliftable("its loop is not one recurrence")
        if len(captured) == 2 and _tokens_are_elsewhere(call, captured):
            raise WrongLayout("its tokens are in another dimension")
        if len({len(each.graph.nodes) for each in captured}) > 1:
            break
    return captured


def _tokens_are_elsewhere(call: Call, captured: list[Captured]) -> bool:
    """True if the ops have all of another dimension's tokens at all of these sizes: what was opened are the heads, or
    the like. Ops of a chunk each say nothing.
    """
    fixed = {dim for _, tensor in call.tensors() for dim in tensor.dims[1:-1] if isinstance(dim, int)}
    calls = [each.graph.find_nodes(op="call_function", target=linear_attention) for each in captured]
    counts = [[compat.example_value(node.args[0]).shape[1] for node in nodes] for nodes in calls]
    return bool(counts[0]) and fixed.issuperset(counts[0]) and all(count == counts[0] for count in counts)


def _sizes(plan: tuple[int, ...]) -> Iterator[Sizes]:
    return ({"B": batch, "T": length} for batch, length in zip(verify.BATCHES, plan, strict=True))


def _modulus(tried: list[int], taken: list[int], numbers: AbstractSet[int]) -> int | None:
    """The number that all lengths the function takes are multiples of, None if it takes every length."""
    if len(taken) == len(tried):
        return None
    for number in sorted((n for n in numbers if n > 1), reverse=True):
        if [length for length in tried if length % number == 0] == taken and len(taken) > 1:
            return number
    raise Unliftable("which lengths it takes is not clear")


def _fewer_heads(call: Call) -> Call:
    """The call with as few heads as keep the ratio between key and value heads: comparing stays cheap. Never with one
    head in the place of several: its stride would tell nothing.
    """
    tensors = [tensor for _, tensor in call.tensors() if "T" in tensor.dims and len(tensor.dims) > 2]
    where = 3 - tensors[0].dims.index("T")
    heads = {tensor.dims[where] for tensor in tensors if where < len(tensor.dims)}
    common = math.gcd(*(head for head in heads if isinstance(head, int)))
    divisor = common // next((least for least in range(2, common) if common % least == 0), common or 1)
    if divisor < 2:
        return call

    def narrow(_: str, tensor: TensorArg) -> TensorArg:
        at = where if "T" in tensor.dims else min(1, len(tensor.dims) - 1)
        dims = [d // divisor if i == at and d in heads and isinstance(d, int) else d for i, d in enumerate(tensor.dims)]
        return replace(tensor, dims=tuple(dims))

    return call.map_tensors(narrow)


def _as_data(match: Match, fn: types.FunctionType) -> dict[str, Any]:
    data = asdict(match)
    data["source"] = source_of(fn)
    data["roles"] = dict(match.roles)
    return data

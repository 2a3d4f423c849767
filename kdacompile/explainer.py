"""``kdacompile.explain(fn)(*args)``: run once through the real backend and say what happened.

The call is captured under a fresh code object, so compiled functions of the caller keep their Dynamo cache entries and
their recompile budget, and explaining twice really captures twice.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from types import FunctionType
from typing import Any, cast

import torch

from kdacompile import compat
from kdacompile.errors import SubjectError
from kdacompile.report import trace
from kdacompile.report.collect import collecting, emit_break
from kdacompile.report.findings import Saved, Stage
from kdacompile.report.report import Report
from kdacompile.settings import Settings, parse

Backend = Callable[..., Any]
_serial = itertools.count(1)

# Frames behind a graph break are compiled under their own code object. Newer torch keeps the cache entries of one
# torch.compile call apart; older torch counts them together, so at least explaining itself must not run into the limit.
_ISOLATED: dict[str, Any] = (
    {"isolate_recompiles": True} if "isolate_recompiles" in inspect.signature(torch.compile).parameters else {}
)
_NO_LIMIT = {"recompile_limit": 1 << 20, "accumulated_recompile_limit": 1 << 20}


def explain(
    fn: Callable[..., Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    backend: Backend | None = None,
    stages: bool = False,
    timed: bool = False,
) -> Callable[..., Report]:
    """Explain what ``torch.compile(fn, backend="kda")`` does with one call.

    Returns a function: ``explain(model)(*args, **kwargs)`` runs the model once on those arguments and returns the
    :class:`~kdacompile.report.report.Report`, with the model's output as ``report.result``. What is not rewritten runs
    eagerly (``kda.inner="eager"``), which makes explaining cheap; pass ``options={"kda.inner": "inductor"}`` for the
    full compilation. ``timed`` calls both forms again for a second each, and estimates from that what the matches gain
    (``report.saved``). ``stages`` keeps every graph as text, from Dynamo's to the rewritten one (``report.stages``).
    ``backend`` replaces the backend function itself, for tests.
    """
    if not callable(fn):
        raise SubjectError(subject=fn, problem="it is neither a function nor a module")
    target = _original(fn)
    settings = {"kda.inner": "eager", **(options or {})}

    def explained(*args: Any, **kwargs: Any) -> Report:
        probe = _Probe(backend or _kda(), mode, settings)
        compiled = torch.compile(_fresh(target), backend=probe, dynamic=dynamic, fullgraph=fullgraph, **_ISOLATED)
        kept: list[Stage] = []
        keeping = trace.keeping(kept) if stages else nullcontext()
        with collecting() as report, keeping, compat.dynamo_settings(_NO_LIMIT):
            report.result = compiled(*args, **kwargs)
        report.title, report.stages = _name(target), kept
        _use_own_names(report, target)
        report.captured, report.device = probe.graphs, probe.device
        if timed and report.matches:
            report.saved = _saved(lambda: target(*args, **kwargs), lambda: compiled(*args, **kwargs))
        return report

    return explained


class _Probe:
    """The backend with a count of the graphs it is given."""

    def __init__(self, backend: Backend, mode: str | None, options: Mapping[str, Any]) -> None:
        self.backend, self.mode, self.options = backend, mode, options
        self.graphs, self.device = 0, ""

    @property
    def kdacompile_settings(self) -> Settings:
        """What capture may do for this backend: see ``capture.hook``."""
        return parse(self.mode, self.options)

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        tensors = (x for x in example_inputs if isinstance(x, torch.Tensor))
        self.device = next((x.device.type for x in tensors), self.device)
        # Counted afterwards: the backend may have capture start anew instead.
        compiled = self.backend(gm, example_inputs, mode=self.mode, options=dict(self.options))
        self.graphs += 1
        if self.backend is not _kda():  # which tells it
            emit_break(gm)
        return compiled


def _saved(before: Callable[[], object], after: Callable[[], object]) -> Saved:
    extensions = logging.getLogger("torch.utils.cpp_extension")  # torch.utils.benchmark imports it, and it warns of a
    level = extensions.level  # CUDA that nobody asked for
    extensions.setLevel(logging.ERROR)
    from kdacompile.bench import measure  # it needs torch's profiler, and who asks for no times does not

    extensions.setLevel(level)
    found = measure.timings({"before": before, "after": after})
    gain = measure.Speedup.of(found["before"], found["after"])
    text = f"a call takes {found['after']} instead of {found['before']}: {gain}; what did not match ran eagerly in both"
    busy = measure.load()
    return Saved(found["before"].median, found["after"].median, f"{text}; {busy}" if busy else text)


def _kda() -> Backend:
    from kdacompile.backend import kda

    return kda


def _original(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function or module behind an already compiled one."""
    for attribute in ("_orig_mod", "_torchdynamo_orig_callable"):
        inner = getattr(fn, attribute, None)
        if inner is not None:
            return cast("Callable[..., Any]", inner)
    return fn


def _fresh(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper with a code object of its own, under a name of its own.

    Dynamo keeps compiled code per code object; and it remembers the sizes seen per code *name*, so under one shared
    name the second explained model would be captured with dynamic shapes for no reason of its own.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    code = call.__code__.replace(co_name=f"explain_{next(_serial)}")
    return FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)


_OF_THE_WRAPPER = re.compile(r"^args\[(\d+)\]|^kwargs\['(\w+)'\]|^(fn)(?=\.)")


def _use_own_names(report: Report, fn: Callable[..., Any]) -> None:
    """What the wrapper calls ``args[0]``, ``kwargs['q']`` and ``fn.weight`` gets the names that ``fn`` has for them."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(fn.forward if isinstance(fn, torch.nn.Module) else fn).parameters.values()
    except (TypeError, ValueError):  # a function of C's
        parameters = ()
    names = [parameter.name for parameter in parameters if parameter.kind in positional]

    def own(found: re.Match[str]) -> str:
        place, name, _ = found.groups()
        if place is None:
            return name or "self"
        return names[int(place)] if int(place) < len(names) else found[0]

    for index, graph in enumerate(report.graphs):
        roles = ({role: _OF_THE_WRAPPER.sub(own, text) for role, text in m.roles.items()} for m in graph.matches)
        told = (replace(m, roles=named) for m, named in zip(graph.matches, roles, strict=True))
        report.graphs[index] = replace(graph, matches=tuple(told))


def _name(fn: Callable[..., Any]) -> str:
    if isinstance(fn, torch.nn.Module) or not (inspect.isfunction(fn) or inspect.ismethod(fn)):
        return type(fn).__name__
    return fn.__qualname__

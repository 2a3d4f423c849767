"""``torch.compile(model, backend="kda")``: Inductor, with linear attention rewritten before it starts."""

from __future__ import annotations

import functools
import importlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

import torch
from torch import fx

from kdacompile import capture, compat, doctor
from kdacompile.capture import open_lengths, tables
from kdacompile.containment import contain
from kdacompile.errors import UnknownOptionError
from kdacompile.graph.build import Tables
from kdacompile.lowering.ahead import telling
from kdacompile.report import on_disk
from kdacompile.report.collect import emit_break, postpone
from kdacompile.report.findings import GraphReport
from kdacompile.report.report import enforce
from kdacompile.search import compiler_pass
from kdacompile.search.compiler_pass import Analysis
from kdacompile.settings import Settings, parse
from kdacompile.store.disk import source_fingerprint

log = logging.getLogger(__name__)


class KdaPass(compat.CustomGraphPass):
    """The rewrite as Inductor's pre-grad pass. Inductor runs it on nested graphs itself, so it does not recurse.

    ``earlier`` is what the user had in that place: it runs first, and is part of the identity. ``analysis`` is what is
    known of the graph already, if something is.
    """

    def __init__(self, settings: Settings, earlier: object = None, analysis: Analysis | None = None) -> None:
        self.settings = settings
        self.earlier = compat.as_passes(earlier)
        self.analysis = analysis
        self.reports: list[GraphReport] = []
        """One per graph the pass ran on: none if the compiled code came from a cache."""
        self.nested: dict[fx.GraphModule, GraphReport] = {}
        """What was found in the graphs nested in one that the pass has still to see."""

    def __reduce__(self) -> tuple[Any, ...]:
        # torch 2.11 hashes the pickled pass into its cache keys: no reports (they hold timings) and no graphs may be in
        # it, and no less than the whole identity.
        return _revive, (self.settings, self.earlier, self.identity())

    def __call__(self, graph: fx.Graph) -> None:
        for run in self.earlier:
            run(graph)
        gm = graph.owning_module
        assert gm is not None  # Inductor's always have one
        report = compiler_pass.run(gm, self.settings, lifted=capture.lifted, analysis=self.analysis)
        self.reports.append(report)
        self.nested[gm] = report
        if not compat.in_nested_graph():
            found, self.nested = self.nested, {}
            enforce(_together(gm, found), self.settings)

    def identity(self) -> str:
        """Changes with everything that could change the result, as far as the passes before this one tell."""
        own = f"kdacompile-{source_fingerprint()}-{self.settings.fingerprint()}"
        return "+".join([own, *(str(compat.pass_uuid(run)) for run in self.earlier)])

    def uuid(self) -> Any:
        """The identity for Inductor; None, so that nothing is cached, if a pass before this one has none."""
        return None if any(compat.pass_uuid(run) is None for run in self.earlier) else self.identity()


def _together(gm: fx.GraphModule, reports: Mapping[fx.GraphModule, GraphReport]) -> GraphReport:
    """What was found in a graph and in those nested in it, each as often as it is called (branches: as if all were)."""
    calls = Counter({gm: 1})
    for module in (each for each in gm.modules() if isinstance(each, fx.GraphModule)):  # those outside come first
        for node in module.graph.find_nodes(op="get_attr"):
            nested = compat.attribute(module, node)
            if nested in reports:
                calls[nested] += calls[module]
    found = [report for module, report in reports.items() for _ in range(calls[module] or 1)]
    return GraphReport(
        tuple(match for report in found for match in report.matches),
        tuple(rejection for report in found for rejection in report.rejections),
        sum(report.nodes for report in reports.values()),
    )


def _revive(settings: Settings, earlier: object, identity: str) -> KdaPass:
    del identity  # that of the process that pickled; this one has its own
    return KdaPass(settings, earlier)


def inductor_pass(**options: Any) -> KdaPass:
    """The rewrite alone, for whoever drives Inductor without ``torch.compile``, as AOTInductor's users do::

        program = torch.export.export(model, example)
        configs = {"pre_grad_custom_pass": kdacompile.inductor_pass(strict=True)}
        torch._inductor.aoti_compile_and_package(program, inductor_configs=configs)

    ``options`` are the ``kda.*`` options without their prefix.
    """
    if "inner" in options:
        raise UnknownOptionError(key="inner", hint=": inductor_pass() is for Inductor")
    return KdaPass(parse(None, {f"kda.{key}": value for key, value in options.items()}))


def load_package(path: str | PathLike[str], **options: Any) -> Any:
    """``torch._inductor.aoti_load_package`` for a package that holds this package's operators, which it calls by name.

    ``options`` are that function's. Without :mod:`kdacompile.ops` imported, torch reports an unknown operator.
    """
    importlib.import_module("kdacompile.ops")
    return compat.aoti_load_package(path, **options)


def kda(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The backend function; ``mode`` and ``options`` as torch.compile hands them over (see ``settings.parse``)."""
    settings = _for_this_machine(parse(mode, options), example_inputs)
    if settings.inner != "inductor" and settings.inductor_patches():
        _say_not_inductor(settings.inner, ", ".join(sorted(settings.inductor_patches())))
    analysis = Analysis(gm, settings)
    analysis.tables = contain(
        "looking for tables", lambda: _tables(analysis, example_inputs), _none, strict=settings.strict
    )
    contain("choosing sizes to leave open", lambda: _open(analysis), _not_opened, strict=settings.strict)
    with telling("a first call: proving what matches, and compiling"), open_lengths.given_up_where_refused():
        compiled = _compiled(gm, example_inputs, analysis)
    emit_break(gm)
    contain("leaving out guards", lambda: open_lengths.forget_bases(analysis), postpone, strict=settings.strict)
    return compiled


def _for_this_machine(settings: Settings, example_inputs: Sequence[Any]) -> Settings:
    """Without the C++ compiler that Inductor needs for a CPU, or where it cannot link, what is not rewritten runs
    eagerly.
    """
    compiler = compat.has_cpp_compiler()
    if settings.inner != "inductor" or (compiler and not doctor.is_unquoted()):
        return settings
    if not any(isinstance(x, torch.Tensor) and x.device.type == "cpu" for x in example_inputs):
        return settings
    if compiler:
        _say_eager(doctor.UNQUOTED, doctor.UNQUOTED_HINT)
    else:
        _say_eager("no C++ compiler was found", doctor.COMPILER_HINT)
    return replace(settings, inner="eager")


@functools.cache
def _say_eager(why: str, hint: str) -> None:
    log.warning("%s, so what kdacompile does not rewrite runs eagerly: %s", why, hint)


@functools.cache
def _say_not_inductor(inner: str, names: str) -> None:
    """Once for each set of names: a model is compiled graph by graph."""
    log.warning(
        "Inductor does not run with kda.inner=%r, so these options of its, or of a mode, do nothing: %s", inner, names
    )


def _tables(analysis: Analysis, example_inputs: Sequence[Any]) -> Tables:
    """Inputs whose values a match may rely on. None beside passes of the user's: those run first, inside Inductor; and
    none where tokens lie on several ranks: the graph as captured would be no substitute.
    """
    settings, prospects = analysis.settings, analysis.prospects
    others = settings.inner == "inductor" and compat.as_passes(_earlier(settings))
    if others or settings.context_parallel is not None or not (prospects.recurrence and prospects.owned):
        return {}
    return tables.find(analysis.captured, example_inputs)


def _none(reason: str) -> Tables:
    postpone(reason)
    return {}


def _open(analysis: Analysis) -> None:
    """Does not return if the graph is to be captured once more, with other sizes open."""
    open_lengths.keep_if_rewritten(analysis)
    open_lengths.open_lengths(analysis)


def _not_opened(reason: str) -> None:
    postpone(reason)
    open_lengths.give_up()


def _compiled(gm: fx.GraphModule, example_inputs: Sequence[Any], analysis: Analysis) -> Callable[..., Any]:
    settings = analysis.settings
    if settings.inner == "inductor" and not analysis.tables:
        return _inductor(gm, example_inputs, analysis)
    reports = {
        module: compiler_pass.run(module, settings, lifted=capture.lifted, analysis=analysis)
        for module in gm.modules()
        if isinstance(module, fx.GraphModule)
    }
    enforce(_together(gm, reports), settings)
    names = {name for report in reports.values() for match in report.matches for name in match.holds}
    relied_on = {name: values for name, values in analysis.tables.items() if name in names}
    captured = fx.GraphModule(gm, analysis.captured) if relied_on else gm
    compiled = _INNER[settings.inner](gm, example_inputs, settings)
    if not relied_on:
        return compiled
    return contain("guarding tables", lambda: tables.Guarded(compiled, captured, relied_on), lambda _: captured)


def _earlier(settings: Settings) -> object:
    """Passes of the user's own in our pass's place."""
    return settings.inductor_patches().get(compat.PASS_OPTION, compat.inductor_option(compat.PASS_OPTION))


def _eager(gm: fx.GraphModule, example_inputs: Sequence[Any], settings: Settings) -> Callable[..., Any]:
    return gm.forward


def _aot_eager(gm: fx.GraphModule, example_inputs: Sequence[Any], settings: Settings) -> Callable[..., Any]:
    return compat.aot_eager(gm, list(example_inputs))


def _rewritten(gm: fx.GraphModule, example_inputs: Sequence[Any], settings: Settings) -> Callable[..., Any]:
    """Inductor on a graph that is rewritten already."""
    with compat.cache_key_tag(KdaPass(settings, _earlier(settings)).identity()):
        return compat.compile_fx(gm, example_inputs, config_patches=settings.inductor_patches())


_INNER = {"inductor": _rewritten, "eager": _eager, "aot_eager": _aot_eager}


def _inductor(gm: fx.GraphModule, example_inputs: Sequence[Any], analysis: Analysis) -> Callable[..., Any]:
    settings = analysis.settings
    patches = settings.inductor_patches()
    run = KdaPass(settings, _earlier(settings), analysis)
    memory = contain(
        "looking for a report on disk",
        lambda: on_disk.KeptReport(gm, run.identity(), tuple(capture.lifted(gm.graph))),
        lambda _: None,
        strict=settings.strict,
    )
    # torch 2.11 leaves the pass's uuid out of the AOT cache key; the tag is in it on every version.
    with compat.cache_key_tag(run.identity()):
        compiled = compat.compile_fx(gm, example_inputs, config_patches={**patches, compat.PASS_OPTION: run})
    if memory is not None:
        tell = functools.partial(memory.keep, run.reports) if run.reports else memory.emit
        contain("remembering a report", tell, postpone, strict=settings.strict)
    return compiled


capture.install(kda)  # Dynamo captures before it calls the backend, so importing the backend is the moment

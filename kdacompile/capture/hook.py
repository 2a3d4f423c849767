"""Where Dynamo is about to inline a function: put the proven replacement there instead.

Only for regions compiled with this backend; every other backend, eager mode and ``torch.export`` see the function
itself, which is never touched.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import types
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch

from kdacompile import compat
from kdacompile.capture import autocast, experts, library, loop, open_lengths
from kdacompile.capture.calls import MIN_TENSORS, Call, TensorArg, describe
from kdacompile.capture.documented import Documented
from kdacompile.capture.errors import Unliftable
from kdacompile.capture.identity import Identity, has_loop, identify, is_trusted
from kdacompile.capture.lifting import Lifted, Lifts
from kdacompile.compat import dynamo, root, sizes
from kdacompile.containment import contain
from kdacompile.errors import KdaError
from kdacompile.report import refusals
from kdacompile.report.collect import lifting, postpone
from kdacompile.report.source import LIFT
from kdacompile.search.matching import FIXED_GRAPHS
from kdacompile.settings import Settings, parse

log = logging.getLogger(__name__)

lifts = Lifts()
_identities: WeakKeyDictionary[types.FunctionType, Identity] = WeakKeyDictionary()
Find = Callable[[Any, dynamo.CallSite, Settings, "list[Any]"], Lifted]
"""The replacement of a function at a call; the variables to call it with go to the list. Raises ``Unliftable``."""

Replacement = tuple[Lifted, "list[Any]"]
"""What is called in a function's place, and the variables it is called with."""

Look = Callable[[Any, dynamo.CallSite], "Replacement | None"]

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.memory_format)


def install(backend: Callable[..., Any]) -> None:
    """Start looking at calls in regions that are compiled with ``backend``."""
    if not _backends:
        dynamo.on_function_call(consult)
        dynamo.on_disabled_call(consult_library)
        dynamo.on_module_call(consult_module)
        root.on_compiled_function(consult_compiled)
    _backends.append(backend)


_backends: list[Callable[..., Any]] = []


def consult(fn: Any, site: dynamo.CallSite) -> Any:
    """The replaced call's result, or None to let Dynamo inline the function."""
    return _contained(fn, site, _replacement)


def consult_compiled(site: root.Root) -> Any:
    """What the compiled function itself returns, or None to let Dynamo capture it."""
    if not _plausible(site.function.__code__):
        return None
    return _contained(site.function, site, functools.partial(_replacement, find=_find_compiled))


def consult_library(fn: Any, site: dynamo.CallSite) -> Any:
    """The same for a function that a library keeps torch.compile out of."""
    return _contained(fn, site, _library_replacement)


def consult_module(module: Any, site: dynamo.CallSite) -> Any:
    """The result of a module that is called as it is, from within the graph; None to let Dynamo inline it."""
    fn: Any = getattr(type(module), "forward", None)
    if loop.read(fn) is None or refusals.is_left(fn):
        return None
    variables: list[Any] = []

    def attempt() -> Any:
        settings = _settings(site)
        return None if settings is None or not settings.lift else experts.replaced(module, site, variables)

    run = contain("looking at a module", attempt, functools.partial(_leave, fn))
    return None if run is None else site.call(run, variables)


def _leave(fn: Any, reason: str) -> None:
    """Have Dynamo capture calls of ``fn`` from here on: an error of ours is why."""
    refusals.leave(fn, reason)
    postpone(reason, library.source_of(fn))


def _contained(fn: Any, site: dynamo.CallSite, look: Look) -> Any:
    """Call what ``look`` finds, if it finds something. After an error of ours the function is left to Dynamo for good;
    where it had begun to capture the replacement, it captures the region once more.
    """

    def again(reason: str) -> Any:
        _leave(fn, reason)
        raise sizes.capture_again("kdacompile: a replacement cannot be captured")

    def strict() -> bool:
        settings = _settings(site)
        return settings is not None and settings.strict

    def attempt() -> Replacement | None:
        return None if refusals.is_left(fn) else look(fn, site)

    found = contain("looking at a call", attempt, functools.partial(_leave, fn), strict=strict)
    if found is None:
        return None
    lifted, tensors = found
    return contain("capturing a replacement", lambda: site.call(lifted.run, tensors), again, strict=strict)


def _replacement(fn: Any, site: dynamo.CallSite, find: Find | None = None) -> Replacement | None:
    if site.begins_region() and (settings := _settings(site)) is not None:
        open_lengths.recall(settings)
    if library.of(fn) is not None:
        return _library_replacement(fn, site)
    if not isinstance(fn, types.FunctionType) or not _plausible(fn.__code__) or is_trusted(str(fn.__module__)):
        return None
    return _attempt(fn, site, find or _find)


def _library_replacement(fn: Any, site: dynamo.CallSite) -> Replacement | None:
    documented = library.of(fn)
    return None if documented is None else _attempt(fn, site, functools.partial(_find_library, documented))


def _attempt(fn: Any, site: dynamo.CallSite, find: Find) -> Replacement | None:
    """What ``find`` finds; None where it says why there is nothing."""
    settings = _settings(site)
    if settings is None or not settings.lift:
        return None
    tensors: list[Any] = []
    try:
        if site.under_transform():
            raise Unliftable("it is called under a mode that changes operators or a transform of torch.func")
        if site.in_own_function():
            raise Unliftable("it is called in a torch.autograd.Function")
        with compat.no_saved_tensors_hooks(), lifting():
            found = find(fn, site, settings, tensors)
    except Unliftable as error:
        log.info("not lifted: %s: %s", library.name_of(fn), error.reason)
        refusals.note(fn, error.reason)
        return None
    refusals.forget(fn)
    log.info("lifted %s at %s", found.verdict.function, found.verdict.source)
    return found, tensors


@functools.cache
def _plausible(code: types.CodeType) -> bool:
    """A function of several arguments with a loop of its own: without one, capture does not grow with the length."""
    several = code.co_argcount + code.co_kwonlyargcount >= 3 or bool(code.co_flags & inspect.CO_VARARGS)
    return several and not code.co_filename.startswith(LIFT) and has_loop(code)


def _settings(site: dynamo.CallSite) -> Settings | None:
    """The settings if the region is compiled with this backend."""
    try:
        for backend, given in site.backend():
            explained = getattr(backend, "kdacompile_settings", None)
            if isinstance(explained, Settings):
                return explained
            if any(backend is own for own in _backends):
                return parse(given.get("mode"), given.get("options"))
    except KdaError:  # the backend will say so itself
        return None
    return None


def _find(fn: types.FunctionType, site: dynamo.CallSite, settings: Settings, tensors: list[Any]) -> Lifted:
    call = _call(fn, site, tensors)
    if len(tensors) < MIN_TENSORS:
        raise Unliftable("it takes fewer than three tensors")
    _refuse_nothing(tensors, site)
    site.widen_region(fn)
    identity = _identity(fn)
    may_fix = compat.times_captured() is not None
    found, opened = lifts.find(fn, identity, call, settings, lengths_vary=_lengths_vary(), fix=may_fix)
    _check_length(found, tensors, site)
    _guard_widths(opened, tensors, site)
    _guard_numbers(site)
    _open_length(found, tensors, site, settings)
    _guard(identity, site)
    return found


def _find_compiled(fn: types.FunctionType, site: dynamo.CallSite, settings: Settings, tensors: list[Any]) -> Lifted:
    assert isinstance(site, root.Root)
    for name, value in site.read_arguments().items():  # before Dynamo looks at one that it may not know
        if not isinstance(value, (torch.Tensor, *_PLAIN)):
            raise Unliftable(refusals.object_argument(name))
    return _find(fn, site, settings, tensors)


def _find_library(
    documented: Documented, fn: Any, site: dynamo.CallSite, settings: Settings, tensors: list[Any]
) -> Lifted:
    call = _call(fn, site, tensors, documented=True)
    found = lifts.find_library(fn, documented, call, settings)
    if not found.matches:  # a convolution: whether linear attention follows is not known yet
        return found
    site.widen_region(fn)
    _open_length(found, tensors, site, settings)
    return found


def _identity(fn: types.FunctionType) -> Identity:
    """What ``fn`` is, now; looked at anew whenever something it depends on was exchanged."""
    known = _identities.get(fn)
    if known is None or not known.holds():
        known = _identities[fn] = identify(fn)
    return known


def _call(fn: Any, site: dynamo.CallSite, tensors: list[Any], *, documented: bool = False) -> Call:
    """The arguments of the call; Dynamo's variables for the tensors go to ``tensors``, in the call's order.

    ``documented``: by the signature of the function that wrappers stand in front of.
    """
    signature = inspect.signature(fn, follow_wrapped=documented)
    try:
        bound = signature.bind(*site.args, **site.kwargs)
    except TypeError as error:  # a mistake of the user's, which the function itself will report
        raise Unliftable(str(error)) from error
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    captured = compat.times_captured()
    may_fix = not documented and captured is not None and captured < FIXED_GRAPHS

    def read(name: str, variable: Any) -> Any:
        example = site.example(variable)
        if example is not None:
            tensors.append(variable)
            return describe(example, documented=documented)
        value, known = site.constant(variable)
        if not known and may_fix:
            value = site.number_now(variable)
            known = value is not None
        if not known or not (_is_plain(value) if documented else isinstance(value, _PLAIN)):
            raise Unliftable(refusals.object_argument(name))
        return value

    by_name = {inspect.Parameter.KEYWORD_ONLY}
    if not any(kinds[name] is inspect.Parameter.VAR_POSITIONAL for name in bound.arguments):
        by_name.add(inspect.Parameter.POSITIONAL_OR_KEYWORD)  # defaults may have been left out in between
    arguments: list[tuple[str, Any]] = []
    for name, given in bound.arguments.items():
        if kinds[name] is inspect.Parameter.VAR_POSITIONAL:
            arguments += [(f"{name}.{place}", read(name, item)) for place, item in enumerate(given)]
        elif kinds[name] is inspect.Parameter.VAR_KEYWORD:
            arguments += [(f"={key}", read(key, item)) for key, item in given.items()]
        else:
            arguments.append((f"={name}" if kinds[name] in by_name else name, read(name, given)))
    devices = (item.device for _, item in arguments if isinstance(item, TensorArg))
    return Call(tuple(arguments), autocast.ambient(devices))


def _is_plain(value: Any) -> bool:
    parts: tuple[Any, ...] = value if isinstance(value, tuple) else (value,)
    return all(isinstance(part, _PLAIN) for part in parts)


def _refuse_nothing(tensors: list[Any], site: dynamo.CallSite) -> None:
    """Raises ``Unliftable`` for an empty tensor: a loop without turns returns what it was given, the op a copy. What
    is a number now is guarded to stay one, where an open size can become zero (``x[:, n:]``).
    """
    shapes = [example.shape for each in tensors if (example := site.example(each)) is not None]
    for size in (size for shape in shapes for size in shape):
        with contextlib.suppress(compat.NoHint):
            if compat.size_hint(size) == 0 or size == 0:
                raise Unliftable("one of its tensors is empty")


def _check_length(found: Lifted, tensors: list[Any], site: dynamo.CallSite) -> None:
    """Raises ``Unliftable`` for a length the function refuses: it shall say so itself."""
    index, dim = found.verdict.tokens
    modulus = found.verdict.modulus
    if modulus and compat.size_hint(site.example(tensors[index]).shape[dim]) % modulus:  # type: ignore[union-attr]
        raise Unliftable("it does not take this length")


def _guard_widths(opened: Call, tensors: list[Any], site: dynamo.CallSite) -> None:
    """Guard the heads and widths that the caller has left open (``dynamic=True``) and the replacement has not."""
    for variable, (_, axes) in zip(tensors, opened.tensors(), strict=True):
        example = site.example(variable)
        for size, axis in zip([] if example is None else example.shape, axes.dims, strict=False):
            if isinstance(axis, int) and compat.times_captured(size) is None:
                raise Unliftable("a number of heads or a width is to stay open")
            if isinstance(axis, int) and size != axis:
                raise Unliftable("a size is not what it was")


def _guard_numbers(site: dynamo.CallSite) -> None:
    """Guard the whole numbers that the caller has left open and the verdict is for as they are."""
    for number in site.open_numbers:
        if number != compat.size_hint(number):
            raise Unliftable("a number is not what it was")


def _lengths_vary() -> bool:
    """True in inference, where the next prompt has another length; batches to train on are usually cut to one."""
    return not torch.is_grad_enabled()


def _open_length(found: Lifted, tensors: list[Any], site: dynamo.CallSite, settings: Settings) -> None:
    """Leave the length open in the first graph already, so that it is not one that only this length can use."""
    index, dim = found.verdict.tokens
    example = site.example(tensors[index])
    length = 1 if example is None else example.shape[dim]
    if _lengths_vary() and not isinstance(length, torch.SymInt) and length > 1:
        open_lengths.open_up(sizes.as_open(site.inputs_of_size(length)), settings)


def _guard(identity: Identity, site: dynamo.CallSite) -> None:
    """Guard everything the function reads, since Dynamo does not get to see it read."""
    site.guard_defaults(identity.functions[0][0])
    for read in identity.reads:
        if read.cell is not None:
            guarded = site.guard_cell(read.owner, read.cell)
        else:
            guarded = site.guard_global(read.owner.__globals__, read.name, read.attributes)
        if not guarded:
            raise Unliftable(f"{read.name} of {read.owner.__qualname__} cannot be guarded")

"""What ``torch.compile(..., backend="kda", mode=..., options={...})`` was asked for, checked and frozen.

Keys under ``kda.`` are ours and validated strictly; every other key must be one of ``torch._inductor.config`` and
goes there. ``mode`` is accepted inside options too, because torch.compile refuses ``mode=`` and ``options=`` together.
A mistake is refused by name when compilation starts, never ignored.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args, get_origin

# Torch-private: the table of modes and the names and types of Inductor's options.
from kdacompile import compat
from kdacompile.errors import (
    ModeConflictError,
    OptionTypeError,
    OptionValueError,
    UnknownModeError,
    UnknownOptionError,
    UnsupportedModeError,
)

Verify = Literal["standard", "wide"]
Precision = Literal["match", "fp32"]
Inner = Literal["inductor", "aot_eager", "eager"]

# kdacompile runs as a pre-grad pass: whatever turns those off would silently turn this backend off too.
_NO_PRE_GRAD = "it turns Inductor's pre-grad passes off, and kdacompile runs as one of them"
_UNSUPPORTED_MODES = {"lite": _NO_PRE_GRAD}
_REFUSED_INDUCTOR_VALUES: dict[str, tuple[object, str]] = {"use_pre_grad_passes": (False, _NO_PRE_GRAD)}


@dataclass(frozen=True)
class Settings:
    """One compilation's settings. Build it with :func:`parse`."""

    mode: str = "default"
    strict: bool = False
    expect: tuple[tuple[str, int], ...] = ()
    verify: Verify = "standard"
    precision: Precision = "match"
    inner: Inner = "inductor"
    disable: tuple[str, ...] = ()
    lift: bool = True
    cost_model: bool = True
    deadline: float = 30.0
    context_parallel: tuple[Any, ...] | None = None
    inductor_options: tuple[tuple[str, Any], ...] = field(default=(), hash=False)

    @property
    def judges_cost(self) -> bool:
        """Whether a match may be left to Inductor since an op takes longer. Not over the tokens of several ranks: what
        is left there would see its own rank's alone.
        """
        return self.cost_model and self.context_parallel is None

    def inductor_patches(self) -> dict[str, Any]:
        """The config patches to hand to Inductor: those of the mode, then the user's own."""
        return {**compat.inductor_modes()[self.mode], **dict(self.inductor_options)}

    def fingerprint(self) -> str:
        """The part of a cache key these settings account for: equal text, equal rewriting and equal checks.

        ``strict`` and ``expect`` belong to it: a cached artifact skips the pass, and with it the check. Inductor's
        options do not: Inductor's own key has them.
        """
        own = {key: getattr(self, key.removeprefix("kda.")) for key in sorted(_OWN_OPTIONS)}
        return json.dumps(own, sort_keys=True)


def parse(mode: str | None = None, options: Mapping[str, Any] | None = None) -> Settings:
    """Validate ``mode`` and ``options`` as torch.compile hands them over."""
    own: dict[str, Any] = {}
    inductor: dict[str, Any] = {}
    if not isinstance(cast(object, options), Mapping | None):
        raise OptionTypeError(key="options", expected="a dict", value=options)
    given = dict(options or {})
    mode = _checked_mode(mode, given.pop("mode", None))
    for key, value in given.items():
        if key in _OWN_OPTIONS:
            own[key.removeprefix("kda.")] = _OWN_OPTIONS[key](key, value)
        else:
            inductor[_inductor_name(key)] = _checked_inductor_value(key, value)
    return Settings(mode=mode, inductor_options=tuple(sorted(inductor.items())), **own)


def known_patterns() -> tuple[str, ...]:
    """The names ``kda.expect`` and ``kda.disable`` accept."""
    from kdacompile.patterns.mla import definition as mla
    from kdacompile.patterns.recurrence.family import FAMILY

    return (*(row.name for row in FAMILY), mla.NAME)


# -- our own keys -----------------------------------------------------------------------------------------------------


def _boolean(key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise OptionTypeError(key=key, expected="True or False", value=value)
    return value


def _seconds(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise OptionTypeError(key=key, expected="a number of seconds", value=value)
    if not value > 0:
        raise OptionValueError(key=key, expected="a number of seconds above 0", value=value)
    return float(value)


def _context(key: str, value: object) -> object:
    from kdacompile.distributed import ContextParallel  # torch.distributed is slow to import

    if not isinstance(value, ContextParallel):
        raise OptionTypeError(key=key, expected="a kdacompile.distributed.ContextParallel", value=value)
    return value.key


def _choice(choices: object) -> Callable[[str, object], str]:
    names: tuple[str, ...] = get_args(choices)

    def check(key: str, value: object) -> str:
        if not isinstance(value, str) or value not in names:
            raise OptionValueError(key=key, expected="one of " + ", ".join(map(repr, names)), value=value)
        return value

    return check


def _pattern_name(key: str, name: object) -> str:
    known = known_patterns()
    if not isinstance(name, str):
        raise OptionTypeError(key=key, expected="given names of patterns", value=name)
    if name not in known:
        raise OptionValueError(key=key, expected="given names of patterns (" + ", ".join(known) + ")", value=name)
    return name


def _expectation(key: str, value: object) -> tuple[tuple[str, int], ...]:
    if not isinstance(value, Mapping):
        raise OptionTypeError(key=key, expected="a dict from pattern name to count", value=value)
    counts = cast("Mapping[object, object]", value)
    for count in counts.values():
        if isinstance(count, bool) or not isinstance(count, int):
            raise OptionTypeError(key=key, expected="a dict from pattern name to count", value=value)
        if count < 1:
            raise OptionValueError(key=key, expected="a dict of counts of at least 1", value=value)
    return tuple(sorted((_pattern_name(key, name), cast("int", count)) for name, count in counts.items()))


def _pattern_names(key: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, list | tuple | set | frozenset):
        raise OptionTypeError(key=key, expected="a list of pattern names", value=value)
    return tuple(sorted({_pattern_name(key, name) for name in cast("Iterable[object]", value)}))


_OWN_OPTIONS: dict[str, Callable[[str, object], Any]] = {
    "kda.strict": _boolean,  # raise on a near miss, and where nothing matched
    "kda.expect": _expectation,  # raise when a graph has fewer matches of a pattern than this
    "kda.verify": _choice(Verify),  # how many probes a proof takes; there is no "off"
    "kda.precision": _choice(Precision),  # absorb upcasts of the inputs ("match"), or keep computing in fp32
    "kda.inner": _choice(Inner),  # the compiler of everything that is not rewritten
    "kda.disable": _pattern_names,  # patterns never to rewrite
    "kda.deadline": _seconds,  # processor time to search a graph without a match; 30 s unless told
    "kda.context_parallel": _context,  # the model sees a rank's tokens of longer sequences
    "kda.cost_model": _boolean,  # leave to Inductor where an op is estimated to take longer
    "kda.lift": _boolean,  # replace proven functions before they are captured, so that one graph serves all lengths
}


# -- mode and Inductor's keys -----------------------------------------------------------------------------------------


def _checked_mode(mode: object, option: object) -> str:
    if mode is not None and option is not None and mode != option:
        raise ModeConflictError(mode=mode, option=option)
    chosen = mode or option or "default"
    known = [name for name in compat.inductor_modes() if name not in _UNSUPPORTED_MODES]
    if not isinstance(chosen, str):
        raise OptionTypeError(key="mode", expected="a string", value=chosen)
    if chosen in _UNSUPPORTED_MODES:
        raise UnsupportedModeError(mode=chosen, reason=_UNSUPPORTED_MODES[chosen])
    if chosen not in known:
        raise UnknownModeError(mode=chosen, known=", ".join(known))
    return chosen


def _inductor_name(key: object) -> str:
    if not isinstance(key, str):
        raise OptionTypeError(key=key, expected="named by a string", value=key)
    name = key.replace("-", "_")  # as Inductor's own option parser does
    if key.startswith("kda.") or name not in compat.inductor_options():
        raise UnknownOptionError(key=key, hint=_did_you_mean(key))
    return name


def _checked_inductor_value(key: str, value: object) -> object:
    name = _inductor_name(key)
    if name in _REFUSED_INDUCTOR_VALUES and value == _REFUSED_INDUCTOR_VALUES[name][0]:
        raise OptionValueError(key=key, expected="left alone (" + _REFUSED_INDUCTOR_VALUES[name][1] + ")", value=value)
    declared: object = compat.inductor_option_type(name)
    # Unions and subscripted generics cannot be checked with isinstance; Inductor itself lets those through too.
    if get_origin(declared) is None and isinstance(declared, type) and not isinstance(value, declared):
        raise OptionTypeError(key=key, expected=f"of type {declared.__name__}", value=value)
    return value


def _did_you_mean(key: str) -> str:
    own = list(_OWN_OPTIONS)
    if key.startswith("kda."):
        names = [option.removeprefix("kda.") for option in own]
        near = difflib.get_close_matches(key.removeprefix("kda."), names, n=1)
        return f"; did you mean 'kda.{near[0]}'?" if near else "; kdacompile's options are " + ", ".join(own)
    if f"kda.{key}" in own:
        return f"; did you mean 'kda.{key}'?"
    near = difflib.get_close_matches(key, own + compat.inductor_options(), n=1, cutoff=0.7)
    return f"; did you mean {near[0]!r}?" if near else " (neither a kda.* option nor one of torch._inductor.config)"

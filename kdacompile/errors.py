"""Every error a user of kdacompile can meet: one class each, the message as a template on the class.

Raise with keywords, ``raise UnknownOptionError(key="kda.strct", hint=...)``; the fields stay readable on the instance
(``error.fields``), so tests and tools need not parse text. The semantic ops keep theirs in ``kdacompile.ops.errors``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

# Dynamo and Inductor wrap whatever a backend raises (BackendCompilerFailed, InductorError) except this family, so an
# error built on it reaches the caller of the compiled function as itself: ``except StrictError`` works.
from kdacompile.compat import ShortenTraceback


class KdaError(Exception):
    """Base of all errors raised by kdacompile."""

    template: ClassVar[str] = "{detail}"

    def __init__(self, **fields: Any) -> None:
        self.fields = fields
        super().__init__(self.template.format(**fields))

    def __reduce__(self) -> tuple[Callable[..., KdaError], tuple[type[KdaError], dict[str, Any]]]:
        return _rebuild, (type(self), self.fields)


def _rebuild(cls: type[KdaError], fields: dict[str, Any]) -> KdaError:
    return cls(**fields)


class CompileError(KdaError, ShortenTraceback):
    """Raised while torch.compile compiles; Dynamo passes it on unwrapped."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields
        ShortenTraceback.__init__(self, self.template.format(**fields), first_useful_frame=None)


# -- settings ---------------------------------------------------------------------------------------------------------


class UnknownOptionError(CompileError, ValueError):
    """A key of ``options=`` that neither kdacompile nor Inductor knows."""

    template = "unknown option {key!r}{hint}"


class OptionTypeError(CompileError, TypeError):
    """An option whose value has the wrong type."""

    template = "option {key!r} must be {expected}, got {value!r}"


class OptionValueError(CompileError, ValueError):
    """An option of the right type with a value that is not one of those allowed."""

    template = "option {key!r} must be {expected}, got {value!r}"


class UnknownModeError(CompileError, ValueError):
    """A ``mode=`` that does not exist."""

    template = "unknown mode {mode!r}; the modes are {known}"


class UnsupportedModeError(CompileError, ValueError):
    """A mode that exists and cannot work with this backend."""

    template = 'mode {mode!r} cannot be used with backend="kda": {reason}'


class ModeConflictError(CompileError, ValueError):
    """Two different modes, one as ``mode=`` and one inside ``options=``."""

    template = "mode={mode!r} conflicts with options['mode']={option!r}: give one of them"


# -- matching ---------------------------------------------------------------------------------------------------------


class StrictError(CompileError, RuntimeError):
    """``kda.strict`` or ``kda.expect`` is not met; carries every reason why not."""

    template = "{problem}\n{listing}"

    def __init__(self, *, problem: str, reasons: Sequence[str] = (), more: Sequence[str] = (), **_: Any) -> None:
        """``more``: what else there is to know, as what was found."""
        near = reasons or ("(nothing else came near a known pattern)",)
        listing = "\n".join(f"  - {line}" if line in reasons else f"  {line}" for line in (*near, *more))
        super().__init__(problem=problem, reasons=tuple(reasons), more=tuple(more), listing=listing)

    @property
    def reasons(self) -> tuple[str, ...]:
        return self.fields["reasons"]


class InternalError(CompileError, RuntimeError):
    """A mistake of kdacompile's own. Raised under ``kda.strict`` only: else the graph is left to Inductor."""

    template = "internal error of kdacompile while {what} ({kind}: {detail}); please report it with this traceback"


# -- machine ----------------------------------------------------------------------------------------------------------


class MissingDependencyError(KdaError, ImportError):
    """An optional package that the requested command needs."""

    template = "{what} needs {package}: pip install {install}"


class OutputError(KdaError, OSError):
    """A file that a command was told to write and cannot."""

    template = "cannot write {path}: {problem}"


class BenchError(KdaError, RuntimeError):
    """A benchmark that could not be run as asked."""

    template = "{detail}"


class SubjectError(KdaError, ValueError):
    """Something ``kdacompile explain`` was asked about that cannot be run."""

    template = "cannot explain {subject!r}: {problem}"


class UnknownPatternError(KdaError, ValueError):
    """A pattern name that does not exist."""

    template = "unknown pattern {pattern!r}; the patterns are {known}"


class ReportFormatError(KdaError, ValueError):
    """A JSON text that is not a kdacompile report."""

    template = "not a kdacompile report: {detail}"

"""Where an error of ours ends: plain Inductor (or the plain op) instead, and a rejection that asks for a report.

Torch enters this package in four places: the backend function, Inductor's pass, Dynamo's hook, and the ops when they
choose a kernel. Each of them calls what can fail through :func:`contain`, and what it does instead needs nothing of
ours and finds nothing half done. The package has no other blind ``except``.

What is not our error passes: what torch steers itself with (capture anew, skip this frame), what a user did wrong or
asked to be told (``CompileError``: a wrong option, ``kda.strict``), memory that has run out, a device that has failed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TypeVar

import torch

from kdacompile import compat
from kdacompile.errors import CompileError, InternalError

log = logging.getLogger(__name__)

RAISE = "KDA_RAISE_INTERNAL_ERRORS"
"""Set this in the environment to have internal errors raised whatever the options say; the tests do."""

T = TypeVar("T")

_PASSING = (CompileError, MemoryError, torch.OutOfMemoryError, *compat.CONTROL_FLOW, *compat.DEVICE_ERRORS)


def contain(
    what: str, attempt: Callable[[], T], instead: Callable[[str], T], *, strict: bool | Callable[[], bool] = False
) -> T:
    """``attempt()``; where that fails by an error of ours, ``instead`` of it, given the reason to be told.

    ``what`` completes "internal error while ...". Under ``strict`` the error is raised as :class:`InternalError`.
    """
    try:
        return attempt()
    except _PASSING:
        raise
    except Exception as error:  # noqa: BLE001 - the boundary: whatever is wrong with us, the user's model still runs
        failure = error
    kind, detail = type(failure).__name__, str(failure)
    if os.environ.get(RAISE) or (strict() if callable(strict) else strict):
        raise InternalError(what=what, kind=kind, detail=detail) from failure
    log.error(
        "kdacompile met an internal error while %s and leaves this to torch; please report it with this traceback",
        what,
        exc_info=failure,
    )
    reason = f"internal error while {what} ({kind}: {detail}); please report it with the traceback in the log"
    return instead(" ".join(reason.split()))

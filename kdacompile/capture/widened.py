"""Regions captured further than torch.compile captures them, and only as long as that serves a rewrite.

Where a function that may be linear attention is called in inference, the region is captured past operators whose
result's size depends on data, and for any count of chunks or pools (``compat.region``): its layers are one graph then,
which serves every length. A graph with nothing to rewrite is captured again as torch.compile does it, and so is one
that the compiler behind this backend refuses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from torch import fx

from kdacompile import compat
from kdacompile.compat import region
from kdacompile.rewrite import compiler_pass, held
from kdacompile.settings import Settings


def keep(gm: fx.GraphModule, settings: Settings) -> None:
    """Does not return if the graph was captured further for nothing."""
    if region.is_used() and not _is_rewritten(gm, settings):
        raise region.capture_as_ever()


def give_up() -> None:
    """Does not return if the graph was captured further than torch.compile does."""
    if region.is_used():
        raise region.capture_as_ever()


def _is_rewritten(gm: fx.GraphModule, settings: Settings) -> bool:
    """True if a function was replaced in the graph, or something will be; the graph stays as it is."""
    if any(map(compat.is_own_op, gm.graph.nodes)):
        return True
    return bool(compiler_pass.rewrite(held.copy_of(gm), settings).matches)


@contextlib.contextmanager
def given_up_where_refused() -> Generator[None]:
    """Errors of the compiler about a graph that was captured further have it captured again."""
    try:
        yield
    except region.refusals() as error:
        if not region.is_used():
            raise
        raise region.capture_as_ever() from error

"""Regions captured further than torch.compile captures them, and only as long as that serves a rewrite.

Where a function that may be linear attention is called in inference, the region is captured past operators whose
result's size depends on data, and for any count of chunks or pools (``compat.region``): its layers are one graph then,
which serves every length. A graph with nothing to rewrite is captured again as torch.compile does it, and so is one
that the compiler behind this backend refuses.

What it is for: glm5_next keeps rows by a boolean mask, at which its first prompt would be cut into ten graphs, and from
the ninth prompt on its layers would have used up their recompilations and run in eager mode (docs/lengths.md). It goes
once torch.compile captures such masks by itself, which ``capture_dynamic_output_shape_ops`` switches on for a process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from kdacompile import compat
from kdacompile.compat import region
from kdacompile.search.compiler_pass import Analysis


def keep(analysis: Analysis) -> None:
    """Does not return if the graph was captured further for nothing: no function was replaced, and nothing will be."""
    if region.is_used() and not any(map(compat.is_own_op, analysis.captured.nodes)) and not analysis.result.found:
        raise region.capture_as_ever()


def give_up() -> None:
    """Does not return if the graph was captured further than torch.compile does."""
    if region.is_used():
        raise region.capture_as_ever()


@contextlib.contextmanager
def given_up_where_refused() -> Generator[None]:
    """Errors of the compiler about a graph that was captured further have it captured again."""
    try:
        yield
    except region.refusals() as error:
        if not region.is_used():
            raise
        raise region.capture_as_ever() from error

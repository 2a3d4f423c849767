"""The plan with its pictures: what users hold. The data, and all that can be asked of it, stands in ``model.py``."""

from __future__ import annotations

from dataclasses import dataclass

from .model import PlanData
from .page import to_html
from .picture import timeline_svg
from .text import to_text
from .timeline import timeline


@dataclass(frozen=True)
class Plan(PlanData):
    """A program on a target at one shape, as text, picture and page; made by :func:`~kdacompile.lowering.plan.plan`."""

    def __str__(self) -> str:
        return to_text(self)

    def to_svg(self, chunks: int = 4, *, standalone: bool = True) -> str:
        """The scan of one core group over ``chunks`` chunks: Cube lane, workspace, Vec lanes.

        ``standalone``: for a file of its own rather than inside a page.
        """
        return timeline_svg(self, timeline(self, chunks), standalone=standalone)

    def to_html(self, naive: PlanData | None = None) -> str:
        """A page of its own, nothing loaded from elsewhere; with ``naive`` its timeline stands above, to one scale."""
        return to_html(self, naive)

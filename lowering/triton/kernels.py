"""The source of a variant's two chunk kernels."""

from __future__ import annotations

from functools import cache

from .placement import place
from .prologue import Prologue
from .scan import Scan
from .text import docstring
from .variant import Variant


@cache
def chunk_source(variant: Variant) -> str:
    """The module with ``prologue`` and ``scan`` of a variant."""
    placement = place(variant.program)
    return (
        docstring(variant, placement) + Prologue(variant, placement).text() + "\n\n" + Scan(variant, placement).text()
    )

"""The source of a variant's chunk kernels."""

from __future__ import annotations

from functools import cache

from .gram import Gram
from .placement import place
from .scan import Scan
from .solve import Apply, Inverse
from .text import docstring
from .variant import Variant

_EMITTERS = {"gram": Gram, "inverse": Inverse, "apply": Apply, "scan": Scan}


@cache
def chunk_source(variant: Variant) -> str:
    """The module with the kernels of a variant, by their names in its placement."""
    placement = place(variant.program)
    kernels = [_EMITTERS[name](variant, placement).text() for name in placement.kernels]
    return docstring(variant, placement) + "\n\n".join(kernels)

"""What stands upstream of a region and belongs to the op: casts, l2norm, scale, gate activation, sigmoid, head repeats."""

from __future__ import annotations

from kdacompile.patterns.match import Fused


def absorb(fused: Fused, *, keep_upcasts: bool) -> Fused:
    return fused

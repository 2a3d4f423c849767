"""Why a region that looked like linear attention was left alone, as data."""

from __future__ import annotations

from dataclasses import dataclass

from kdacompile.graph.ir import Op


@dataclass(frozen=True)
class Obstacle:
    """``code`` for machines, ``reason`` for people, ``op`` where it stands."""

    code: str
    reason: str
    op: Op | None = None

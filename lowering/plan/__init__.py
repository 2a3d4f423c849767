"""Plans: a tile program cut into stages for one target, with the buffers between them and what it all costs.

:func:`plan` makes one (``planner.py``); see ``model.py`` for what it holds, ``drawn.py`` for its pictures, ``split.py``
for why its hand-overs are the fewest, and ``buffers.py`` for the rules its buffers follow.
"""

from __future__ import annotations

from .drawn import Plan
from .model import NAIVE, Options
from .pipelines import gdn_state_program, naive_program
from .planner import plan

__all__ = ["NAIVE", "Options", "Plan", "gdn_state_program", "naive_program", "plan"]

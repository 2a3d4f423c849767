"""Lifting: a function whose loop is a proven recurrence is replaced by the op before Dynamo unrolls it.

Capture unrolls Python loops, so every number of chunks is another graph, and guards on that number. Once a function is
proven to be the semantic op for every length (``lifting``), Dynamo sees the op in its place: sizes stay symbolic, one
graph serves all lengths, and capture takes as long for 64k tokens as for 64.
"""

from kdacompile.capture.hook import install
from kdacompile.capture.matches import lifted

__all__ = ["install", "lifted"]

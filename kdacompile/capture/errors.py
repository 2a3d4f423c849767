"""Why a function is not lifted."""

from __future__ import annotations


class Unliftable(Exception):
    """The function is left to Dynamo's inlining; ``reason`` completes the sentence "not lifted: ..."."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class WrongLayout(Unliftable):
    """The function does not even run with the dimensions that were taken for batch and tokens."""


class NeverRuns(Unliftable):
    """The function takes none of the stand-ins it is compared on."""

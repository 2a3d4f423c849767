"""What a row of the family says about itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pattern:
    """``gates`` are the kinds of gate it covers; ``equation`` is one step of the recurrence, per head."""

    name: str
    title: str
    equation: str
    gates: tuple[str, ...]
    delta: bool
    source: str

    @property
    def gate(self) -> str:
        return self.gates[0]

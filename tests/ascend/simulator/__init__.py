"""An executor for optimised HIVM: what the Ascend compiler made of a kernel, run on a CPU.

HIVM is the last form the open part of the compiler writes. A mixed kernel has been split by then into a Cube function
(AIC) and a Vec function (AIV), every tile has its address in L1, L0C or UB, and every synchronisation its flag. Here
one AIC and two AIV run as coroutines over numpy memory: the addresses are the compiler's own, memory starts as NaN, and
a core that waits for a flag that nobody sets is a deadlock. Needs numpy, ml_dtypes and the ``ascendnpu-ir`` wheel, and
nothing of kdacompile.

What it computes is one order of things; that no other order computes anything else is what races.py checks: each pipe
of each core has a vector clock, and two accesses that nothing orders are an error. Not modelled: time.
"""

from __future__ import annotations

from .facts import Facts, Memory, UnitFacts, device, facts, next_facts
from .machine import DeadlockError, FlagError, Simulator
from .parse import Module, UnsupportedError, parse
from .races import RaceError

__all__ = [
    "DeadlockError",
    "Facts",
    "FlagError",
    "Memory",
    "Module",
    "RaceError",
    "Simulator",
    "UnitFacts",
    "UnsupportedError",
    "device",
    "facts",
    "next_facts",
    "parse",
]

"""What a plan knows about a machine: its units, where they meet, how much each memory holds, how fast each path is.

Every figure carries its source. A figure that nobody has published is a labelled assumption, and figures that rest on
one are to be read as rankings, not as times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from .errors import ArgumentError

KIB = 1024


class Unit(str, Enum):
    """Where an op runs. CUBE multiplies matrices, VEC does everything else; CORE is a core that does both."""

    CUBE = "cube"
    VEC = "vec"
    CORE = "core"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Figure:
    """A number with its unit and where it comes from."""

    value: float
    unit: str
    source: str

    def __str__(self) -> str:
        return f"{self.value:g} {self.unit} ({self.source})"


@dataclass(frozen=True)
class Bandwidth:
    """Bytes a second of one path for a transfer of n bytes: ``peak * n / (half + n)``, per core."""

    peak: Figure
    half: Figure

    def seconds(self, bytes: float) -> float:
        return 0.0 if bytes <= 0 else (self.half.value + bytes) / self.peak.value


@dataclass(frozen=True, eq=False)
class Target:
    """A machine.

    ``units``: the kinds of core that share one task, in no order. With more than one, every change of unit is a
    hand-over through ``meeting`` ("global": memory behind all caches, "chip": a buffer on chip, "register": no price).
    ``memories``: capacity in bytes by name, of ONE core of the unit that owns it (see ``owner``). ``groups``: how many
    tasks run at once; each group has one CUBE and ``vec_cores`` VEC cores. ``own_operands``: where a result of Cube
    waits that is an operand of its next product ("global" or "chip"). ``accumulates``: whether CUBE begins a sum of
    products from another product's result. ``narrows``: whether it rounds its sums as it stores them. ``outputs``:
    where its kernels compute what reads the carry but nothing waits for, "scan" or "epilogue"; "auto" leaves it to the
    planner. ``values``: where they compute what is as wide as V and waits for no carry: "prologue"; "scan", since all
    it reads crosses anyway or is smaller; or "uninverted", the scan but for what comes from a triangular inverse.
    """

    name: str
    title: str
    units: tuple[Unit, ...]
    meeting: str
    groups: Figure
    vec_cores: int = 1
    memories: Mapping[str, Figure] = field(default_factory=dict[str, Figure])
    rates: Mapping[str, Figure] = field(default_factory=dict[str, Figure])
    paths: Mapping[str, Bandwidth] = field(default_factory=dict[str, Bandwidth])
    own_operands: str = "chip"
    accumulates: bool = True
    narrows: bool = True
    outputs: str = "auto"
    values: str = "prologue"

    @property
    def split(self) -> bool:
        """Whether products and everything else run on different cores."""
        return len(self.units) > 1

    def capacity(self, memory: str) -> int | None:
        """Bytes of one core's ``memory``, or None where nothing is known."""
        figure = self.memories.get(memory)
        return None if figure is None else int(figure.value)


_COMPILER = "ascendnpu-ir 1.2.0 for this target"  # tests/ascend compares each figure with what the compiler says
_FITTED = "reference: fitted on one core of a 910B3"


def _kib(count: float, source: str) -> Figure:
    return Figure(count * KIB, "bytes", source)


def _path(peak_gib: float, half: float, source: str) -> Bandwidth:
    return Bandwidth(Figure(peak_gib * KIB**3, "bytes/s", source), Figure(half, "bytes", source))


def _ascend_memories(ub: int, l0c: int) -> dict[str, Figure]:
    """Of one core, in KiB; what the two generations do not share is named."""
    sizes = {"UB": ub, "L1": 512, "L0A": 64, "L0B": 64, "L0C": l0c}
    return {name: _kib(size, _COMPILER) for name, size in sizes.items()}


_ASCEND_RATES = {
    "clock": Figure(1.8e9, "Hz", "reference: 20 cores give 295 TFLOP/s in bf16"),
    "cube_block": Figure(1, "cycles a 16x16x16 product", "reference: mad = 6 + ceil(m/16) ceil(k/16) ceil(n/16)"),
    "cube_start": Figure(6, "cycles a product", "reference: mad = 6 + ceil(m/16) ceil(k/16) ceil(n/16)"),
    "vec_lanes": Figure(64, "fp32 lanes/cycle", "reference: 64, or 32 for two operands"),
    "vec_start": Figure(30, "cycles an operation", "reference: 16 to 43; the middle is taken"),
    "sync": Figure(1e-6, "s a hand-over", "assumption: nothing is published"),
}
_ASCEND_PATHS = {
    "GM->UB": _path(247, 30643, _FITTED),
    "GM->L1": _path(28.6, 1107, _FITTED),
    "UB->GM": _path(28.2, 1755, _FITTED),
    "L0C->GM": _path(41.3, 29104, _FITTED),
}

ASCEND910B = Target(
    "ascend910b",
    "Ascend 910B (A2, A3)",
    (Unit.CUBE, Unit.VEC),
    "global",
    Figure(20, "core groups", _COMPILER + ": 910B3 and 910B4; 910B1 and 910B2 have 24"),
    vec_cores=2,
    memories=_ascend_memories(ub=192, l0c=128),
    rates=_ASCEND_RATES,
    paths=_ASCEND_PATHS,
    own_operands="global",  # measured: ascendnpu-ir 1.2.0 takes them through its workspace
)
ASCEND910B1 = replace(
    ASCEND910B,
    name="ascend910b1",
    title="Ascend 910B1, 910B2",
    groups=Figure(24, "core groups", _COMPILER + ": 910B1 and 910B2"),
)
ASCEND910_95 = Target(
    "ascend910_95",
    "Ascend 910_95 (next generation)",
    (Unit.CUBE, Unit.VEC),
    "chip",
    Figure(36, "core groups", _COMPILER + ": 910_9599"),
    # it has two Vec cores to a Cube core as well, but ascendnpu-ir 1.2.0 has both of them do the whole of Vec's work
    memories=_ascend_memories(ub=248, l0c=256),
    rates=_ASCEND_RATES,  # nothing is published: the 910B's, to rank plans by
    paths=_ASCEND_PATHS,
    # measured: ascendnpu-ir 1.2.0 makes a product with a start value a product and an addition, and a cast a function
    # of Vec, before it places anything. (The sum stays on Cube where its product is fused with the cast of an operand,
    # but Vec then sends that operand once for every product: more hand-overs, not fewer.)
    accumulates=False,
    narrows=False,
)
_NVIDIA = "NVIDIA H100/H200 data sheet"
CUDA_SM90 = Target(
    "cuda_sm90",
    "NVIDIA Hopper (H200)",
    (Unit.CORE,),
    "register",
    Figure(132, "multiprocessors", _NVIDIA),
    values="uninverted",
    memories={
        "shared": _kib(227, _NVIDIA + ", per block"),
        "registers": _kib(256, _NVIDIA + ", per multiprocessor"),
    },
    rates={
        "matrix": Figure(745e12, "FLOP/s", "measured: bf16 matmul, 700 to 790 on the whole chip"),
        "launch": Figure(3e-6, "s a kernel", "assumption"),
    },
    paths={
        "memory": Bandwidth(
            Figure(4.27e12, "bytes/s", "measured: copy, the whole chip"), Figure(0, "bytes", "whole chip, long copies")
        )
    },
)
_AMPERE = "NVIDIA A100 80GB data sheet"
CUDA_SM80 = replace(
    CUDA_SM90,  # the same emitted kernels
    name="cuda_sm80",
    title="NVIDIA Ampere (A100)",
    groups=Figure(108, "multiprocessors", _AMPERE),
    memories={
        "shared": _kib(163, "CUDA C++ programming guide, compute capability 8.0, per block"),
        "registers": _kib(256, "CUDA C++ programming guide, compute capability 8.0, per multiprocessor"),
    },
    rates={
        "matrix": Figure(312e12, "FLOP/s", _AMPERE + ", bf16 without sparsity: a peak, not measured"),
        "launch": Figure(3e-6, "s a kernel", "assumption"),
    },
    paths={
        "memory": Bandwidth(
            Figure(2.04e12, "bytes/s", _AMPERE + ": a peak, not measured"),
            Figure(0, "bytes", "whole chip, long copies"),
        )
    },
)
CPU = Target(
    "cpu",
    "CPU (torch executor)",
    (Unit.CORE,),
    "register",
    Figure(1, "process", "torch spreads one call over its threads itself"),
    outputs="epilogue",
)

TARGETS: Mapping[str, Target] = {t.name: t for t in (ASCEND910B, ASCEND910B1, ASCEND910_95, CUDA_SM90, CUDA_SM80, CPU)}
_ALIASES = {"ascend": "ascend910b", "npu": "ascend910b", "cuda": "cuda_sm90"}


def target_of(target: str | Target) -> Target:
    """A target by name (aliases: ascend, npu, cuda)."""
    if isinstance(target, Target):
        return target
    name = _ALIASES.get(target, target)
    if name not in TARGETS:
        raise ArgumentError(f"no such target: {target!r}; known are {', '.join((*TARGETS, *_ALIASES))}")
    return TARGETS[name]

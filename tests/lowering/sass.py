"""Uniform registers of a compiled kernel that are read where they may never have been written.

ptxas 12.8 (Triton 3.6) does so with descriptors that two branches share, see ``lowering/hopper/inverse.py``: wrong
numbers, or addresses beyond the shared memory. Such a register is found by data flow over the listing: the registers
written on every path from the entry, before each instruction.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

_LINE = re.compile(r"\s+/\*([0-9a-f]+)\*/\s+(.*?)\s*;|^(\.L_\w+):")
_PREDICATE = re.compile(r"@!?U?P\w+\s+")
_DESCRIPTOR = re.compile(r"gdesc\[UR(\d+)\]")  # of a product with its left operand in registers: the upper two of four
_BRANCH = re.compile(r"`\((\.L_\w+)\)")
_WRITERS = ("R2UR", "S2UR", "U")
_READERS = ("UTMA", "UISETP", "USETMAXREG")  # of those


class Instruction(NamedTuple):
    text: str
    label: str | None
    reads: frozenset[int]
    writes: frozenset[int]


def listing(compiled: Any) -> str:
    """A kernel as Triton's own disassembler prints it."""
    import triton

    tool = Path(str(triton.__file__)).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        return subprocess.run([str(tool), "-c", file.name], capture_output=True, text=True, check=True).stdout


def unwritten(text: str) -> list[str]:
    """The instructions of a listing that read a uniform register which some path to them has not written."""
    code = [_parsed(*found.groups()) for found in map(_LINE.match, text.splitlines()) if found]
    labels = {one.label: number for number, one in enumerate(code) if one.label}
    written: dict[int, frozenset[int]] = {0: frozenset()}
    ahead = [0]
    while ahead:
        number = ahead.pop()
        after = written[number] | code[number].writes
        for then in _next(code, labels, number):
            common = after & written.get(then, after)
            if then not in written or common != written[then]:
                written[then] = common
                ahead.append(then)
    return [code[number].text for number, known in sorted(written.items()) if not code[number].reads <= known]


def _parsed(address: str | None, text: str | None, label: str | None) -> Instruction:
    if text is None:
        return Instruction("", label, frozenset(), frozenset())
    name, _, operands = _PREDICATE.sub("", text, count=1).partition(" ")
    reads = {int(first) + n for first in _DESCRIPTOR.findall(operands) for n in (2, 3)}
    plain = _DESCRIPTOR.sub("", operands)
    numbers = [int(number) for number in re.findall(r"\bUR(\d+)\b", plain)]
    writes: set[int] = set()
    if name.startswith(_WRITERS) and not name.startswith(_READERS) and re.match(r"\s*(UP\w+, *)*UR\d", plain):
        writes = {numbers[0], numbers[0] + 1} if ".64" in name or "WIDE" in name else {numbers[0]}
        numbers = numbers[1:]
        numbers += [number + 1 for number in numbers] if name.startswith("UIADD3.64") else []
    return Instruction(f"{address}: {text}", None, frozenset(reads.union(numbers)), frozenset(writes))


def _next(code: list[Instruction], labels: dict[str, int], number: int) -> list[int]:
    """Where control goes from an instruction; an indirect branch, which begins a warp's role: to each role's start.

    That is where registers are asked for, as in the prepare kernels. Roles of the scans give some back: not followed.
    """
    text = code[number].text.partition(": ")[2]
    name = _PREDICATE.sub("", text, count=1).partition(" ")[0]
    target = _BRANCH.search(text)
    found = [labels[target.group(1)]] if name.startswith("BRA") and target and target.group(1) in labels else []
    if name.startswith("BRX"):
        found += [n for n, one in enumerate(code) if n > number and "USETMAXREG.TRY" in one.text]
    if not name.startswith(("BRA", "EXIT", "RET")) or _PREDICATE.match(text):
        found.append(number + 1)
    return [n for n in found if n < len(code)]

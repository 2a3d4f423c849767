"""The textual form of a tile program: deterministic, one op a line, made for reading and for golden tests."""

from __future__ import annotations

from .ir import Program
from .partition import sections
from .stages import Section


def to_text(program: Program) -> str:
    """Print ports, then the ops under the section of the schedule that they run in, then the carry."""
    lines = [f"program {program.name} over {program.axis}"]
    lines += [f"  # {line}" for line in program.notes.splitlines()]
    lines += [f"  in  {port}" for port in program.inputs]
    lines += [f"  out {port}" for port in program.outputs]
    lines += [f"  scalar {name}" for name in program.scalars]
    placed = sections(program)
    for section in Section:
        ops = [op for op in program.ops if placed[op] is section]
        if ops:
            lines.append(f"  {section.value}:")
            lines += [f"    {op}" for op in ops]
    for carry in program.carries:
        word = "carry" if carry is program.carry else "reverse carry"
        lines.append(f"  {word} {carry.name} : {carry.type} from {carry.init}, step {carry.step}, to {carry.final}")
        if carry.combine is not None:
            for role, part in (("summary", carry.combine.summary), ("merge", carry.combine.merge)):
                lines.append(f"  combine {role}:")
                lines += [f"    {line}" for line in to_text(part).splitlines()]
    return "\n".join(lines) + ("\n" if program.axis else "")

"""The gate functions in C, from their one table: ``log_decay(function, x, rate, gate_scale)`` on vectors."""

from __future__ import annotations

from ..gates import GATE_FUNCTIONS


def functions() -> tuple[str, ...]:
    """The functions that :func:`source` knows by their position."""
    return tuple(GATE_FUNCTIONS)


def source(names: tuple[str, ...]) -> bytes:
    cases = "".join(
        f"    case {number}: /* {name} */\n        return (vector){{0}} + ({GATE_FUNCTIONS[name].formula});\n"
        for number, name in enumerate(names)
    )
    return f"""
INLINE vector log_decay(int64_t function, vector x, vector rate, vector gate_scale)
{{
    switch (function) {{
{cases}    }}
    return x;
}}
""".encode()

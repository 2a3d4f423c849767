"""What the compiler's library functions do to their operands.

A name is an operation, then shapes and types: ``vadd_1d_float``, ``nd2nz_bfloat16_t``. Operands come first, then the
destination, then scratch space. On Cube, tiles are fractal: ``[cols/c0, rows/16, 16, c0]``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from .machine import Core
from .memory import Array, View
from .parse import UnsupportedError

Function = Callable[[Core, list[Any]], None]

_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "vadd": np.add,
    "vsub": np.subtract,
    "vmul": np.multiply,
    "vdiv": np.divide,
    "vmax": np.maximum,
    "vmin": np.minimum,
    "vand": np.logical_and,
    "vor": np.logical_or,
    "vcmp_eq": np.equal,
    "vcmp_ne": np.not_equal,
    "vcmp_lt": np.less,
    "vcmp_le": np.less_equal,
    "vcmp_gt": np.greater,
    "vcmp_ge": np.greater_equal,
}
_UNARY: dict[str, Callable[[Any], Any]] = {
    "vexp": np.exp, "vln": np.log, "vsqrt": np.sqrt, "vnot": np.logical_not, "vabs": np.abs,
}  # fmt: skip
_REDUCTIONS: dict[str, Callable[[Any, int], Any]] = {
    "sum": lambda x, axis: x.sum(axis, dtype=np.float32),
    "max": lambda x, axis: x.max(axis),
}
_ROUNDING: dict[int, Callable[[Any], Any]] = {0: np.rint, 2: np.floor, 3: np.ceil, 4: np.trunc}


def call(callee: str) -> tuple[Function, str, int]:
    """The implementation of a library function, the pipe it runs on ("" where it says so itself), and its first operand
    that is written."""
    for pattern, make, pipe, target in _TABLE:
        found = re.match(pattern, callee)
        if found is not None:
            return make(*found.groups()), pipe, target
    raise UnsupportedError(f"library function {callee}")


def _value(x: Any) -> Any:
    return x.read() if isinstance(x, View) else x


def _binary(name: str) -> Function:
    function = _BINARY[name]
    return lambda core, a: a[2].write(function(_value(a[0]), _value(a[1])))


def _unary(name: str) -> Function:
    function = _UNARY[name]
    return lambda core, a: a[1].write(function(a[0].read()))


def _copy() -> Function:
    return lambda core, a: a[1].write(_value(a[0]))


def _select() -> Function:
    return lambda core, a: a[3].write(np.where(a[0].read(), _value(a[1]), _value(a[2])))


def _cast(source: str) -> Function:
    def cast(core: Core, a: list[Any]) -> None:
        values, target = a[0].read(), a[1]
        mode = int(a[-1])
        if source == "float" and np.issubdtype(target.dtype, np.integer):
            values = _ROUNDING[mode](values)
        target.write(values.astype(target.dtype))

    return cast


def _arange(core: Core, a: list[Any]) -> None:
    """start + sum over axes of stride * index; operands are the target, the start and a stride for each axis."""
    target, start, strides = a[0], a[1], a[2 : 2 + len(a[0].sizes)]
    grids = np.indices(target.sizes)
    target.write(start + sum(stride * grid for stride, grid in zip(strides, grids, strict=True)))


def _reduced_axis(letters: str) -> int:
    """``ra`` reduces the first of two axes, ``ara`` the middle of three."""
    return letters.index("r")


def _reduce(name: str, letters: str) -> Function:
    function, axis = _REDUCTIONS[name], _reduced_axis(letters)
    return lambda core, a: a[1].write(function(a[0].read(), axis).reshape(a[1].sizes))


def _cumsum(letters: str) -> Function:
    axis = _reduced_axis(letters)
    return lambda core, a: a[1].write(np.cumsum(a[0].read(), axis, dtype=np.float32))


# ---- Cube


def _plain(tile: View) -> Array:
    """A fractal tile as the matrix it holds."""
    blocks_n, blocks_m, rows, cols = tile.array.shape
    return tile.array.transpose(1, 2, 0, 3).reshape(blocks_m * rows, blocks_n * cols)


def _nd2nz(core: Core, a: list[Any]) -> None:
    source, target = a[0].array, a[1]
    blocks_n, blocks_m, rows, cols = target.sizes
    padded = np.zeros((blocks_m * rows, blocks_n * cols), source.dtype)
    padded[: source.shape[0], : source.shape[1]] = source
    target.array[...] = padded.reshape(blocks_m, rows, blocks_n, cols).transpose(2, 0, 1, 3)


def _mma(kind: str) -> Function:
    """D = A @ B, or D += A @ B unless ``init``; the trailing operands are pipe events, -1 where there is none."""

    def mma(core: Core, a: list[Any]) -> None:
        left, right, init, m, k, n, target = a[:7]
        waits, sets = a[7:9], a[9:11]
        for event in waits:
            if event >= 0:
                core.wait_flag("MTE2", "MTE1", int(event))
        x, y = (_plain(tile).astype(np.float32) for tile in (left, right))
        x = x.T if kind.startswith("ta") else x
        y = y.T if kind.endswith("tb") else y
        blocks_n, blocks_m, rows, cols = target.sizes
        total = np.zeros((blocks_m * rows, blocks_n * cols), np.float32) if init else _plain(target).copy()
        total[:m, :n] += x[:m, :k] @ y[:k, :n]
        target.array[...] = total.reshape(blocks_m, rows, blocks_n, cols).transpose(2, 0, 1, 3)
        core.clocks.instruction(core.name, "MTE1", "mma", [left, right], [])
        core.clocks.follow(core.name, "MTE1", "M")
        core.clocks.instruction(core.name, "M", "mma", [] if init else [target], [target])
        for event in sets:
            if event >= 0:
                core.set_flag("MTE1", "MTE2", int(event))

    return mma


def _fixpipe(core: Core, a: list[Any]) -> None:
    target = a[1]
    rows, cols = target.sizes
    target.write(_plain(a[0])[:rows, :cols].astype(target.dtype))


_TABLE: tuple[tuple[str, Callable[..., Function], str, int], ...] = (
    (r"(vcmp_\w\w)_", _binary, "V", 2),
    (r"(vcmp)s_(\w\w)_", lambda head, tail: _binary(f"{head}_{tail}"), "V", 2),
    (r"(vadd|vsub|vmul|vdiv|vmax|vmin)s?_", _binary, "V", 2),
    (r"(vand|vor)_", _binary, "V", 2),
    (r"(vexp|vln|vsqrt|vnot|vabs)_", _unary, "V", 1),
    (r"vsel_", _select, "V", 3),
    (r"vcast_(\w+?)_(?:to_\w+)_1d_with", _cast, "V", 1),
    (r"arange_\dd_", lambda: _arange, "V", 0),
    (r"(?:enablevc_)?reduce_(sum|max)_([ar]+)_float", _reduce, "V", 1),
    (r"(?:enablevc_)?cumsum_([ar]+)_float", _cumsum, "V", 1),
    (r"broadcast_(?:scalar|first_axis|middle_axis|last_axis)", _copy, "V", 1),
    (r"copy_ubuf_to_ubuf_", _copy, "V", 1),
    (r"(?:load_gm_to_ubuf|set_l1)_", _copy, "MTE2", 1),
    (r"store_ubuf_to_gm_", _copy, "MTE3", 1),
    (r"nd2nz_", lambda: _nd2nz, "MTE2", 1),
    (r"mma_tile_\w+?_to_float_?(|ta|tb|ta_tb)$", _mma, "", 0),
    (r"fixpipe_nz2nd_", lambda: _fixpipe, "FIX", 1),
)

"""Concolic execution of a function: it runs on numbers that know the formula that made them.

The sizes it asks tensors for, the whole numbers in its text, its loop indices and its counters are ``Size``. Sums,
products and quotients rounded down keep the formula; comparisons are written down with it, and so is every use that no
formula describes (a square root, a text, the key of a dictionary). ``branches`` decides what that means for the lengths
at which the function was not run.

The function itself stays as it is. What runs is a copy with other literals, built-in functions and modules.
"""

from __future__ import annotations

import builtins
import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kdacompile.capture.bytecode import taker, takers
from kdacompile.capture.formulas import OPAQUE, Formula, Size, formula_of, is_opaque, plain
from kdacompile.capture.frames import FrameEnds
from kdacompile.capture.identity import LONGEST_TABLE, Identity, is_trusted
from kdacompile.compat.operators import tree_map_only

Place = tuple[int, int]
"""Where in a function's code: the code object's id (its hash would be that of its literals) and the instruction."""

Point = tuple[int, int]
"""(batch, length) of a run."""

_TURNS = 32
"""Times a size is told apart by how often its place was reached in a run."""


class Run:
    """What one run of the function did."""

    def __init__(self, point: Point) -> None:
        self.point = point
        self.reads: dict[Any, int] = {}
        self.turns: dict[Any, int] = {}
        self.comparisons: set[tuple[Place, str, Formula, float]] = set()
        """(place, relation, formula of the difference of its sides, and its value)."""
        self.uses: set[tuple[Place, str, Formula, int]] = set()
        """(place, what for, formula, value) of numbers that went where no formula follows."""
        self.quotients: set[tuple[Formula, int]] = set()
        """(formula, divisor) of quotients rounded down and of remainders."""
        self.numbers: set[int] = set()
        """Constants that operators were called with."""
        self.answers: set[tuple[Place, str]] = set()
        """(place, answer) of questions about dtypes, but for those whose answer only said how to round."""
        self.devices: set[Place] = set()
        """Places of questions about devices, but for those whose answer only said where a tensor is made."""
        self.asked: list[tuple[Place, str]] = []
        """Such questions, of both kinds, since the last operator."""
        self.refused: set[str] = set()


class Concolic:
    """Concolic runs of one function."""

    def __init__(self, fn: types.FunctionType, identity: Identity) -> None:
        self.runs: list[Run] = []
        self.now = Run((0, 0))
        self.ends = FrameEnds(self.leave)
        """To be entered around many runs: to begin and to end takes time."""
        self.codes = self.ends.codes
        """The function's own code."""
        self.taker = functools.cache(lambda code, made: taker(self.codes[code], made))
        self.operators: set[Place] = set()
        """Places at which operators ran while some answer about a device was kept."""
        self.itself = fn
        """The function, not its copy."""
        self.fn = _Copies(self, identity).of(fn)

    def run(self, call: Callable[..., Any], inputs: Sequence[Any], batch: int, length: int) -> Any:
        """``call(*inputs)``, which calls ``self.fn``; a run that raises is forgotten."""
        self.now = Run((batch, length))
        with self.ends, _Operators(self):
            result = call(*inputs)
        self.runs.append(self.now)
        return tree_map_only(Size, int, result)

    def leave(self, frame: types.FrameType) -> None:
        """Look at what the function's own code leaves behind in its variables."""
        if any(map(_is_table, frame.f_locals.values())):
            self.refuse("it makes a table of numbers")

    def place(self) -> Place:
        """The innermost instruction of the function's own code."""
        frame: Any = sys._getframe(2)
        while frame is not None and id(frame.f_code) not in self.codes:
            frame = frame.f_back
        return (0, 0) if frame is None else (id(frame.f_code), frame.f_lasti)

    def is_asking(self) -> bool:
        """True if the function's own code made this call, and not a library's."""
        frame: Any = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename == __file__:
            frame = frame.f_back
        return frame is not None and id(frame.f_code) in self.codes

    def read(self, value: int, what: Any) -> Size:
        """A number that a tensor or a list was asked for."""
        key = (self.place(), what)
        turn = min(self.now.turns.get(key, 0), _TURNS)
        self.now.turns[key] = turn + 1
        name = ("read", *key, turn)
        known = turn < _TURNS and self.now.reads.setdefault(name, value) == value
        return Size.of(value, name if known else OPAQUE, self)

    def compare(self, relation: str, gap: Formula, value: float) -> None:
        self.now.comparisons.add((self.place(), relation, gap, value))

    def divide(self, formula: Formula, divisor: int) -> None:
        self.now.quotients.add((formula, divisor))

    def use(self, number: Size, what: str) -> None:
        """A number goes where its formula is lost."""
        self.now.uses.add((self.place(), what, number.formula, number.plain()))

    def answer(self, what: Any) -> None:
        """A question about a tensor was answered."""
        asked = (self.place(), str(what))
        self.now.answers.add(asked)
        self.now.asked.append(asked)

    def placed(self) -> None:
        """A tensor was asked where it is."""
        place = self.place()
        self.now.devices.add(place)
        self.now.asked.append((place, ""))

    def takes(self, dtype: torch.dtype | None) -> None:
        """An operator runs. What was asked for in its own arguments, a device or this dtype, went nowhere else."""
        code, taken = place = self.place()
        self.operators |= {place} if self.now.devices else set()
        for asked in self.now.asked:
            (other, made), answer = asked
            if answer in ("", str(dtype)) and other == code and self.taker(code, made) == taken:
                self.now.devices.discard(asked[0])
                self.now.answers.discard(asked)
        self.now.asked.clear()

    def looks_at_devices(self) -> bool:
        """Whether the function does anything with a device but hand it on to operators, be it by a variable."""
        asked = set[Place]().union(*(run.devices for run in self.runs))
        return any(
            code not in self.codes
            or (calls := takers(self.codes[code], made)) is None
            or not all((code, call) in self.operators for call in calls)
            for code, made in asked
        )

    def refuse(self, reason: str) -> None:
        self.now.refused.add(reason)


def _is_table(item: Any) -> bool:
    """True for a list of more numbers than are told apart by running, which a loop may pick from by its index."""
    if not isinstance(item, (list, tuple)) or len(item) <= LONGEST_TABLE:
        return False
    return any(isinstance(each, (int, float)) and not is_opaque(formula_of(each)) for each in item)


# -- operators --------------------------------------------------------------------------------------------------------

_SHAPE, _SIZE = Tensor.shape.__get__, Tensor.size  # type: ignore[attr-defined]
_COUNTS = (Tensor.numel, Tensor.nelement, Tensor.__len__, torch.numel)
_FACTS = frozenset(
    "dim ndimension is_floating_point is_complex is_nonzero is_signed element_size result_type "
    "is_tensor can_cast promote_types is_storage".split()
)
"""Questions about a tensor whose answer the call pattern (``calls.Call``) settles, and autocast besides."""
_ATTRIBUTES = frozenset(
    getattr(Tensor, name).__get__ for name in "ndim dtype layout is_sparse is_nested is_quantized".split()
)
_DEVICES = frozenset(
    (Tensor.get_device, *(getattr(Tensor, name).__get__ for name in "device is_cuda is_meta is_cpu".split()))
)
"""Questions about where a tensor is."""
_EXACT = frozenset((torch.zeros, torch.ones, torch.eye, Tensor.new_zeros, Tensor.new_ones))
"""What makes the same numbers in every dtype."""


def _only_rounds(func: Any, args: Sequence[Any]) -> bool:
    """Whether a call's result has the same numbers in any floating dtype, to rounding."""
    return func in _EXACT or (func is Tensor.to and args[0].is_floating_point())


class _Operators(TorchFunctionMode):
    """Operators get plain numbers; what they say about sizes gets a formula."""

    def __init__(self, concolic: Concolic) -> None:
        super().__init__()
        self.concolic = concolic

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for each in args:
            if type(each) in _HOLDING:
                args = self.unwrapped(args)
                break
        if kwargs:
            out = func(*args, **dict(zip(kwargs, self.unwrapped(kwargs.values()), strict=True)))
        else:
            out = func(*args)
        if isinstance(out, Tensor):
            now = self.concolic.now
            if (now.asked or now.devices) and self.concolic.is_asking():
                self.concolic.takes(out.dtype if _only_rounds(func, args) else None)
            return out
        if not self.concolic.is_asking():
            return out
        if func in (_SHAPE, _SIZE):
            if isinstance(out, int):
                return self.concolic.read(out, plain(args[1]) if len(args) > 1 else "dim")
            return tuple(self.concolic.read(size, dim) for dim, size in enumerate(out))
        if func in _COUNTS:
            return self.concolic.read(out, "count")
        name = getattr(func, "__name__", str(func))
        several = isinstance(out, (tuple, list)) and all(isinstance(item, Tensor) for item in out)
        if func in _DEVICES:
            self.concolic.placed()
        elif func in _ATTRIBUTES or name in _FACTS:
            self.concolic.answer(out)
        elif not several and out is not None:
            self.concolic.refuse(f"it asks a tensor for {_owner(func)}")
        return out

    def unwrapped(self, items: Iterable[Any]) -> list[Any]:
        """Arguments with plain numbers in them. Made for every operator."""
        made: list[Any] = []
        for item in items:
            kind = type(item)
            if kind not in _HOLDING:
                made.append(item)
            elif kind is Size:
                made.append(self.number(item))
            elif kind is slice:
                start, stop, step = item.start, item.stop, item.step
                if type(start) is Size or type(stop) is Size or type(step) is Size:
                    item = slice(self.number(start), self.number(stop), self.number(step))
                made.append(item)
            else:
                inner = self.unwrapped(item)
                made.append(inner if kind is list else tuple(inner))
        return made

    def number(self, item: Any) -> Any:
        if type(item) is not Size:
            return item
        number = int.__int__(item)
        if type(item.formula) is int:
            self.concolic.now.numbers.add(abs(number))
        return number


_HOLDING = frozenset({Size, slice, tuple, list})
"""Types of arguments that are numbers, or may hold some."""


def _owner(func: Any) -> str:
    """The name of an operator, or of the attribute that a getter reads."""
    return str(getattr(getattr(func, "__self__", None), "__name__", None) or getattr(func, "__name__", func))


# -- the copy ---------------------------------------------------------------------------------------------------------


class _Copies:
    """Copies of a function and of those it calls, with numbers that keep their formulas all around."""

    def __init__(self, concolic: Concolic, identity: Identity) -> None:
        self.concolic = concolic
        self.own = {fn for fn, _ in identity.functions}
        self.made: dict[types.FunctionType, types.FunctionType] = {}
        self.builtins = {**vars(builtins), **self.traced_builtins()}

    def of(self, fn: types.FunctionType) -> types.FunctionType:
        if fn in self.made:
            return self.made[fn]
        scope: dict[str, Any] = {"__builtins__": self.builtins, "__name__": fn.__module__}
        cells = tuple(types.CellType() for _ in fn.__closure__ or ())
        made = self.made[fn] = types.FunctionType(self.code(fn.__code__), scope, fn.__name__, None, cells or None)
        made.__defaults__ = self.value(fn.__defaults__)
        made.__kwdefaults__ = {key: self.value(item) for key, item in (fn.__kwdefaults__ or {}).items()}  # type: ignore[assignment]
        for name in _names_in(fn.__code__):
            if name in fn.__globals__:
                scope[name] = self.value(fn.__globals__[name])
        for cell, own in zip(cells, fn.__closure__ or (), strict=True):
            cell.cell_contents = self.value(own.cell_contents)
        return made

    def code(self, code: types.CodeType) -> types.CodeType:
        made = code.replace(co_consts=tuple(self.literal(const) for const in code.co_consts))
        self.concolic.ends.watch(made)
        return made

    def literal(self, const: Any) -> Any:
        if isinstance(const, types.CodeType):
            return self.code(const)
        if type(const) is int:
            return Size.of(const, const, self.concolic)
        return tuple(map(self.literal, const)) if type(const) is tuple else const

    def value(self, item: Any) -> Any:
        """A global, a default or a closure's content as the copy sees it."""
        if isinstance(item, types.FunctionType) and item in self.own:
            return self.of(item)
        if type(item) is tuple:
            return tuple(map(self.value, item))
        if isinstance(item, types.ModuleType):
            plain = is_trusted(item.__name__) and item.__name__.split(".")[0] == "torch"
            return item if plain else _Module(item, self)
        if type(item) is int:
            return Size.of(item, item, self.concolic)
        library = isinstance(item, (types.FunctionType, types.BuiltinFunctionType))
        if library and not str(item.__module__).startswith("torch"):
            return self.outside(item)
        return item

    def outside(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """A library's function gets plain numbers; functions of numbers lose the formula."""
        module, name = str(getattr(fn, "__module__", "")), fn.__name__
        concolic = self.concolic
        if module == "itertools" and name not in ("chain", "product", "zip_longest", "pairwise", "starmap"):
            return lambda *args, **kwargs: (concolic.refuse(f"it calls itertools.{name}"), fn(*args, **kwargs))[1]
        if module in ("functools", "itertools", "_operator", "typing") and name != "index":
            return fn  # these go through the numbers' own methods

        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            if module in ("math", "cmath", "_operator", "numpy"):
                for number in (item for item in (*args, *kwargs.values()) if isinstance(item, Size)):
                    concolic.use(number, f"takes {name} of a size")
            plain = [tree_map_only(Size, Size.plain, item) for item in args]
            return fn(*plain, **{key: tree_map_only(Size, Size.plain, item) for key, item in kwargs.items()})

        return call

    def traced_builtins(self) -> dict[str, Any]:
        concolic = self.concolic

        def indices(*bounds: Any) -> Iterable[int]:
            if not any(isinstance(bound, Size) for bound in bounds):
                return range(*bounds)
            return [Size.of(index, OPAQUE, concolic) for index in range(*map(plain, bounds))]

        def counted(items: Iterable[Any], start: int = 0) -> Iterator[tuple[int, Any]]:
            for index, item in enumerate(items, plain(start)):
                yield Size.of(index, OPAQUE, concolic), item

        def length(items: Any) -> Any:
            many = len(items)
            return many if isinstance(many, Size) else concolic.read(many, "len")

        return {"range": indices, "enumerate": counted, "len": length, "int": _Int}


class _AnyInt(type):
    def __instancecheck__(cls, item: Any) -> bool:
        return isinstance(item, int)


class _Int(int, metaclass=_AnyInt):
    """``int``, which leaves a number its formula."""

    def __new__(cls, number: Any = 0, *base: Any) -> Any:
        return number if isinstance(number, Size) else int(number, *base)


class _Module:
    """A module whose functions are called with plain numbers, or traced."""

    def __init__(self, module: types.ModuleType, copies: _Copies) -> None:
        self.__dict__["_behind"] = module, copies

    def __getattr__(self, name: str) -> Any:
        module, copies = self.__dict__["_behind"]
        return copies.value(getattr(module, name))


def _names_in(code: types.CodeType) -> set[str]:
    return set(code.co_names).union(
        *(_names_in(const) for const in code.co_consts if isinstance(const, types.CodeType))
    )

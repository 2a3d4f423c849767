"""What a function is: everything its result can depend on besides its arguments, as a hash and as things to guard.

A verdict about a function holds as long as nothing it runs changes: its code, constants, defaults and closure, the
globals it reads, and the same of every function it calls. Libraries of ``TRUSTED`` count by their version instead. What
cannot be pinned down like that (an object's attributes, a file, a random number) makes the function unliftable.
"""

from __future__ import annotations

import builtins
import dis
import functools
import hashlib
import importlib.metadata
import inspect
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kdacompile.capture.errors import Unliftable

TRUSTED = frozenset(
    "torch math cmath operator functools itertools typing typing_extensions collections numbers dataclasses "
    "__future__ einops numpy warnings".split()
)
"""Packages whose functions are told apart by the package's version."""

TRUSTED_PARTS = ("transformers.utils.",)

_CALLABLE_BUILTINS = frozenset(
    "abs all any bool dict divmod enumerate filter float getattr hasattr int isinstance issubclass iter len list map "
    "max min next pow range repr reversed round set slice sorted str sum tuple type zip AssertionError Exception "
    "ImportError IndexError KeyError NotImplementedError RuntimeError TypeError ValueError".split()
)
_FORBIDDEN_NAMES = frozenset(
    "no_grad set_grad_enabled enable_grad inference_mode detach detach_ autocast is_compiling is_dynamo_compiling "
    "is_torchdynamo_compiling graph_break disable synchronize register_hook retain_grad backward "
    "rand randn randint rand_like randn_like dropout bernoulli multinomial normal_ uniform_ random_ manual_seed item "
    "tolist numpy data_ptr cpu cuda print requires_grad requires_grad_ is_leaf grad_fn is_grad_enabled is_inference "
    "is_inference_mode_enabled is_autocast_enabled get_autocast_dtype are_deterministic_algorithms_enabled "
    "get_float32_matmul_precision environ getenv "
    "data autograd grad _base _is_view is_set_to is_contiguous stride storage_offset as_strided "
    "storage untyped_storage".split()
)
"""Attributes and functions whose effect a replacement would lose: on gradients, random numbers, or the outside, and
those that make a result depend on the state of the process, or on where its arguments lie in memory."""

LONGEST_TABLE = 16
"""Numbers a tuple may hold: a loop that picks one by its index would have to be run until the last."""

_FORBIDDEN_OPCODES = ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR", "YIELD_VALUE", "SEND")
_REPEATS = frozenset(
    opcode
    for name, opcode in dis.opmap.items()
    if name in ("FOR_ITER", "JUMP_ABSOLUTE") or ("JUMP_BACKWARD" in name and "NO_INTERRUPT" not in name)
)
_MAX_FUNCTIONS = 40
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.memory_format, type(Ellipsis))


@dataclass(frozen=True)
class Read:
    """A global (or what attributes lead to from it) or a closure cell that the function, or one it calls, reads."""

    owner: Any  # a function: typed as one, it would be read as a method of this class
    name: str
    value: Any
    attributes: tuple[str, ...] = ()
    cell: int | None = None
    """Index into the owner's closure; None for a global."""


@dataclass
class Identity:
    """The hash of a function with all it runs, what must stay as it is, and the numbers its code mentions."""

    digest: str
    reads: list[Read]
    numbers: frozenset[int]
    functions: list[tuple[types.FunctionType, tuple[Any, ...]]]

    def holds(self) -> bool:
        """True as long as nothing it was made of has been exchanged since."""
        return all(_parts(fn) == parts for fn, parts in self.functions) and all(map(_unchanged, self.reads))


@dataclass
class _Walk:
    reads: list[Read] = field(default_factory=list)
    numbers: set[int] = field(default_factory=set)
    seen: dict[int, types.FunctionType] = field(default_factory=dict)
    parts: list[str] = field(default_factory=list)


def identify(fn: types.FunctionType) -> Identity:
    """Everything ``fn`` depends on; raises ``Unliftable`` if that cannot be pinned down."""
    walk = _Walk()
    _function(fn, walk)
    text = "\n".join([torch.__version__, *walk.parts])
    functions = [(each, _parts(each)) for each in walk.seen.values()]
    return Identity(hashlib.sha256(text.encode()).hexdigest(), walk.reads, frozenset(walk.numbers), functions)


def _parts(fn: types.FunctionType) -> tuple[Any, ...]:
    return fn.__code__, fn.__defaults__, tuple((fn.__kwdefaults__ or {}).items())


def _unchanged(read: Read) -> bool:
    try:
        value = (read.owner.__closure__ or ())[read.cell].cell_contents if read.cell is not None else None
    except (IndexError, ValueError):
        return False
    if read.cell is None:
        value = read.owner.__globals__.get(read.name)
        for name in read.attributes:
            value = getattr(value, name, None)
    return value is read.value


def has_loop(code: types.CodeType) -> bool:
    """True if the function itself (not one it calls) repeats something."""
    return not _REPEATS.isdisjoint(code.co_code[::2])


def _function(fn: types.FunctionType, walk: _Walk) -> None:
    if id(fn) in walk.seen:
        return
    walk.seen[id(fn)] = fn
    if len(walk.seen) > _MAX_FUNCTIONS:
        raise Unliftable("it runs too many functions to keep track of")
    walk.parts.append(f"def {fn.__module__}.{fn.__qualname__}")
    _code(fn.__code__, walk)
    for value in (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()):
        _value(value, walk, "a default")
    for index, name in enumerate(fn.__code__.co_freevars):
        try:
            value = (fn.__closure__ or ())[index].cell_contents
        except ValueError:
            raise Unliftable(f"{name} has no value yet") from None
        walk.reads.append(Read(fn, name, value, cell=index))
        _value(value, walk, name)
    for chain in _global_reads(fn.__code__):
        _global(fn, chain, walk)


def _code(code: types.CodeType, walk: _Walk) -> None:
    if code.co_flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
        raise Unliftable("it is asynchronous")
    steps = list(_steps(code))
    body = [(inst.opname, inst.argrepr if not isinstance(inst.argval, types.CodeType) else "") for inst in steps]
    handlers = getattr(code, "co_exceptiontable", b"")  # until Python 3.10 they are in the body
    walk.parts.append(repr((body, handlers, code.co_argcount, code.co_kwonlyargcount, code.co_varnames, code.co_flags)))
    generator = bool(code.co_flags & inspect.CO_GENERATOR) and code.co_name != "<genexpr>"
    for inst in steps:
        own = code.co_name == "<genexpr>" and inst.opname == "YIELD_VALUE"
        if generator or (inst.opname in _FORBIDDEN_OPCODES and not own):
            raise Unliftable(f"{code.co_name} has effects beyond its result ({inst.opname.lower()})")
        if inst.opname == "IMPORT_NAME" and not is_trusted(str(inst.argval)):
            raise Unliftable(f"{code.co_name} imports {inst.argval}")
    for name in code.co_names:
        if name in _FORBIDDEN_NAMES or name.startswith("__"):
            raise Unliftable(f"{code.co_name} uses {name}")
    _check_identities(code, steps)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            _code(const, walk)
        elif isinstance(const, str) and const in _FORBIDDEN_NAMES:  # for getattr
            raise Unliftable(f"{code.co_name} uses {const}")
        else:
            _collect_numbers(const, walk)


def _check_identities(code: types.CodeType, steps: Sequence[dis.Instruction]) -> None:
    """Whether two tensors are one object, or share memory, depends on the call; ``is None`` does not."""
    before: dis.Instruction | None = None
    for inst in steps:
        if inst.opname == "IS_OP" and before is not None and not _is_one_of_a_kind(before):
            raise Unliftable(f"{code.co_name} asks whether two objects are one")
        if inst.opname in ("BUILD_SET", "SET_ADD"):
            raise Unliftable(f"{code.co_name} makes a set")
        if inst.opname.startswith("BINARY") and inst.argrepr in ("%", "") and inst.opname != "BINARY_SUBSCR":
            texts = [const for const in code.co_consts if isinstance(const, str) and "%" in const]
            if texts and (inst.argrepr == "%" or inst.opname == "BINARY_MODULO"):
                raise Unliftable(f"{code.co_name} turns numbers into text")
        before = inst


def _is_one_of_a_kind(loads: dis.Instruction) -> bool:
    """True for the instruction that loads None, a truth value or a dtype."""
    if loads.opname == "LOAD_CONST":
        return loads.argval is None or isinstance(loads.argval, bool) or loads.argval is Ellipsis
    return loads.opname == "LOAD_ATTR" and isinstance(getattr(torch, str(loads.argval), None), torch.dtype)


def _steps(code: types.CodeType) -> Iterator[dis.Instruction]:
    return (inst for inst in dis.get_instructions(code) if inst.opname not in ("CACHE", "RESUME", "NOP", "PRECALL"))


def _collect_numbers(const: Any, walk: _Walk) -> None:
    if isinstance(const, (tuple, frozenset)):
        if sum(isinstance(item, (int, float)) for item in const) > LONGEST_TABLE:  # pyright: ignore[reportUnknownVariableType]
            raise Unliftable("it holds a table of numbers")
        for item in const:  # pyright: ignore[reportUnknownVariableType]
            _collect_numbers(item, walk)
    elif isinstance(const, int) and not isinstance(const, bool):
        walk.numbers.add(abs(const))


def _global_reads(code: types.CodeType) -> Iterator[tuple[str, ...]]:
    """Globals the code loads, each with the attributes taken from it right away: ("torch", "linalg", "solve")."""
    chain: list[str] = []
    for inst in _steps(code):
        if inst.opname in ("LOAD_ATTR", "LOAD_METHOD") and chain:
            chain.append(str(inst.argval))
            continue
        if chain:
            yield tuple(chain)
        chain = [str(inst.argval)] if inst.opname in ("LOAD_GLOBAL", "LOAD_NAME") else []
    if chain:
        yield tuple(chain)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _global_reads(const)


def _global(fn: types.FunctionType, chain: tuple[str, ...], walk: _Walk) -> None:
    name, *attributes = chain
    if name not in fn.__globals__:
        if not hasattr(builtins, name):
            raise Unliftable(f"{name} is not defined")
        if name not in _CALLABLE_BUILTINS:
            raise Unliftable(f"it calls {name}")
        return
    value = fn.__globals__[name]
    path: list[str] = []
    while isinstance(value, types.ModuleType) and len(path) < len(attributes):
        path.append(attributes[len(path)])
        value = getattr(value, path[-1], None)
    if isinstance(value, types.FunctionType) and attributes[len(path) :] and not _is_library(value):
        raise Unliftable(f"it reads {attributes[len(path)]} of {name}, which may change")
    walk.reads.append(Read(fn, name, value, tuple(path)))
    _value(value, walk, ".".join([name, *path]))


def _value(value: Any, walk: _Walk, label: str) -> None:
    walk.parts.append(label)
    if isinstance(value, _PLAIN):
        walk.parts.append(repr(value))
        _collect_numbers(value, walk)
    elif isinstance(value, tuple):
        _collect_numbers(value, walk)  # pyright: ignore[reportUnknownArgumentType]
        for item in value:  # pyright: ignore[reportUnknownVariableType]
            _value(item, walk, label)
    elif _is_library(value):
        walk.parts.append(f"{_name_of(value)} of {_module_of(value)}=={_version(_module_of(value))}")
    elif isinstance(value, types.FunctionType):
        _function(value, walk)
    else:
        raise Unliftable(f"it depends on {label}, {_article(type(value).__name__)}")


def _article(name: str) -> str:
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def _is_library(value: Any) -> bool:
    """True for modules, functions and classes of trusted packages; not for objects that may change."""
    code = isinstance(value, (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type))
    return (code or type(value).__module__ == "torch._ops") and is_trusted(_module_of(value))


def _module_of(value: Any) -> str:
    if isinstance(value, types.ModuleType):
        return value.__name__
    if type(value).__module__ == "torch._ops":
        return "torch"
    return str(getattr(value, "__module__", None) or type(value).__module__)


def _name_of(value: Any) -> str:
    return str(getattr(value, "__qualname__", None) or getattr(value, "__name__", value))


def is_trusted(module: str) -> bool:
    """True for modules that count by their version."""
    root = module.split(".")[0]
    return root in TRUSTED or root == "builtins" or module.startswith(TRUSTED_PARTS)


@functools.cache
def _version(module: str) -> str:
    try:
        return importlib.metadata.version(module.split(".")[0])
    except importlib.metadata.PackageNotFoundError:
        return "python"  # the standard library, which comes with the bytecode's own version

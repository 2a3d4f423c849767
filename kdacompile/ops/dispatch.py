"""What the ops ask of the dispatcher to keep a call cheap."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from typing import Any, Protocol

import torch

from kdacompile.compat import no_saved_tensors_hooks
from kdacompile.compat.dispatcher import (
    DispatchKey,
    DispatchKeySet,
    SingleLevelFunction,
    after_autograd_keys,
    after_version_counter_keys,
    any_requires_grad,
    backend_key,
    below_version_counter,
    call_instead,
    count_write,
    dispatch_state,
    enable_single_level_autograd_function,
    forward_mode_is_on,
    forward_mode_switched_on,
    function_modes,
    likeness,
    profiler_is_on,
    transforms_are_active,
    without_keys_excluded,
)
from kdacompile.containment import contain
from kdacompile.ops.signature import O_DIMENSIONS

Kernel = Callable[..., Any]


class Remembered(Protocol):
    """What does the same for other tensors. ``alignment``: bytes that addresses must be multiples of; ``uses_torch``:
    whether operators of torch run, which must count no version; ``free``: by the position of an operand, its dimension
    whose size may be another than in the first call, and then its strides as well, as far as ``fits`` agrees.
    """

    @property
    def alignment(self) -> int: ...
    @property
    def uses_torch(self) -> bool: ...
    @property
    def free(self) -> Mapping[int, int]: ...
    def fits(self, operands: Sequence[Any], /) -> bool: ...
    def run(self, operands: Sequence[Any], addresses: Sequence[int], /) -> Any: ...


Known = Callable[[Sequence[Any], dict[str, Any]], Remembered | None]


def needs_derivative(tensors: tuple[Any, ...]) -> bool:
    """True if autograd must see this call. Inside forward-mode AD it always must, so that it can refuse."""
    return (torch.is_grad_enabled() and any_requires_grad(*tensors)) or forward_mode_is_on()


def record(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply`` from inside an autograd kernel.

    Under a functorch transform ``apply`` would hand over to an operator that has no kernel this far down. Torch's own
    operators record on the one level that is being processed, and so does this.
    """
    if not transforms_are_active():
        return function.apply(*args)
    single_level: Any = _single_level(function)
    with enable_single_level_autograd_function():
        return single_level.apply(*args)


@functools.cache
def _single_level(function: type[torch.autograd.Function]) -> type[SingleLevelFunction]:
    names = ("forward", "setup_context", "backward", "jvp")
    return type(function.__name__, (SingleLevelFunction,), {n: staticmethod(getattr(function, n)) for n in names})


@contextlib.contextmanager
def inside_function() -> Generator[None]:
    """The context of the op that a recorded function calls: below autograd, on this level.

    A function's forward runs with grad mode off, and does not follow tangents. Under nested functorch transforms that
    would reach the levels further out, which would then take the result for a constant.
    """
    nested = transforms_are_active()
    tangents = forward_mode_switched_on() if nested else contextlib.nullcontext()
    with torch.set_grad_enabled(nested), tangents, below_version_counter():
        yield


def next_kernel(
    keyset: DispatchKeySet, kernels: Mapping[DispatchKey, Kernel], *, mutates: bool = False
) -> tuple[Kernel | None, DispatchKeySet]:
    """The kernel below autograd if it is one of ours, and the keys below autograd for a redispatch if it is not.

    A redispatch from Python converts every argument to C++ and back, some 13 us for the eighteen arguments of a step.
    The key set says what the dispatcher would find: a plain backend key means that no mode, subclass or functorch level
    stands between, and then the kernel may be called as a function.
    """
    below = keyset & (after_version_counter_keys if mutates else after_autograd_keys)
    return kernels.get(below.highestPriorityTypeId()), below


MOST = 8
"""Kinds of calls of an op that are looked through, the newest first."""


class Kind:
    """Calls like one that is remembered: one look of torch's own at the tensors in place of all else that is asked.

    It covers what :meth:`Shortcut.kernel` and a remembered call's key do: classes, keys (the thread's too, so modes,
    transforms and autocast), dtypes, devices, shapes, strides. Addresses are multiples of what is asked, and what is
    written shares no memory.
    """

    def __init__(
        self, tensors: Sequence[Any], options: dict[str, Any], remembered: Remembered, writes: int | None
    ) -> None:
        present = [at for at, x in enumerate(tensors) if x is not None]
        given, free = [tensors[at] for at in present], remembered.free
        self._count, self._absent = len(tensors), [at for at, x in enumerate(tensors) if x is None]
        self._given = _picker(present)
        self._like = likeness(*given, free=[free.get(at) for at in present])
        self._options, self._remembered, self._writes = options, remembered, writes
        self._differentiable = any_requires_grad(*given)
        self._bytes = [0 if x is None else _extent(x) for x in tensors]
        self._alignment, self._fits = remembered.alignment, remembered.fits if free else None
        self._torch = remembered.uses_torch

    def addresses(self, tensors: Sequence[Any], options: Mapping[str, Any]) -> list[int] | None:
        """Those of a call's tensors if it is of this kind."""
        if len(tensors) != self._count or options != self._options:
            return None
        for at in self._absent:
            if tensors[at] is not None:
                return None
        if not self._like(*self._given(tensors)):  # None among them is like nothing
            return None
        if self._differentiable and torch.is_grad_enabled():
            return None
        addresses = [0 if x is None else x.data_ptr() for x in tensors]
        if self._alignment > 1 and functools.reduce(operator.or_, addresses) % self._alignment:
            return None
        if self._fits is not None and not self._fits(tensors):
            return None
        if self._writes is not None:
            begin = addresses[self._writes]
            end, inside = begin + self._bytes[self._writes], 0
            for at, size in zip(addresses, self._bytes, strict=True):
                if at < end and begin < at + size:
                    inside += 1
            return addresses if inside == 1 else None
        return addresses

    def run(self, tensors: Sequence[Any], addresses: Sequence[int]) -> Any:
        if self._writes is not None:
            count_write(tensors[self._writes])
        if self._torch:
            with below_version_counter():
                results = self._remembered.run(tensors, addresses)
        else:
            results = self._remembered.run(tensors, addresses)
        return results if self._writes is None else results[0]


def _picker(places: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """What takes these of a sequence; the first operand of every op is there."""
    return operator.itemgetter(*places) if len(places) > 1 else operator.itemgetter(slice(places[0], places[0] + 1))


def _extent(x: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (1 + reach) * x.itemsize if x.numel() else 0


class Shortcut:
    """``op(...)``, by a kernel called as a function where the dispatcher would do nothing but find one.

    Compiled graphs call the op so, too. The dispatcher takes the eighteen arguments of a step to C++ and back twice,
    longer than all that a remembered call does. It is left out for plain tensors of a device, while no mode, transform,
    autocast, tracer or profiler looks on and nothing is to be differentiated. ``optional``: which operands may be None.
    ``options``: their types; the dispatcher would convert others, and refuse a call without some. ``writes``: the
    position of the operand that is overwritten, whose mutation is counted.
    """

    def __init__(
        self,
        op: Any,
        kernels: Mapping[DispatchKey, Kernel],
        optional: Sequence[bool],
        options: Mapping[str, str],
        writes: int | None,
    ) -> None:
        self._kernels, self._writes, self._optional, self._options = kernels, writes, optional, options
        self._backends: dict[Hashable, DispatchKey | None] = {}
        self._kinds: tuple[Kind, ...] = ()
        self.known: dict[Kernel, Known] = {}
        """What kernels remember of a call, of those that do."""
        self._dispatched = call_instead(op, self)

    def __call__(self, *tensors: Any, **options: Any) -> Any:
        if self._kinds and not (function_modes() or profiler_is_on() or forward_mode_is_on()):
            for kind in self._kinds:
                addresses = kind.addresses(tensors, options)
                if addresses is not None:
                    return kind.run(tensors, addresses)
        kernel = self.kernel(tensors, options)
        if kernel is None:
            return self._dispatched(*tensors, **options)
        results = self.run(kernel, tensors, options)
        known = self.known.get(kernel)
        if known is not None:
            contain("keeping a kind of call", lambda: self._keep(known, tensors, options), self._keep_no_more)
        return results

    def _keep(self, known: Known, tensors: tuple[Any, ...], options: dict[str, Any]) -> None:
        """The call that was just made among the kinds, if it is remembered."""
        asked = {name: value for name, value in options.items() if (name, value) != ("o_layout", O_DIMENSIONS)}
        remembered = known(tensors, asked)
        if remembered is not None:
            kind = Kind(tensors, options, remembered, self._writes)
            if kind.addresses(tensors, options) is not None:
                self._kinds = (kind, *self._kinds[: MOST - 1])

    def _keep_no_more(self, _: str) -> None:
        self.known.clear()

    def kernel(self, tensors: tuple[Any, ...], options: Mapping[str, Any]) -> Kernel | None:
        """What serves this call; None where it is the dispatcher's."""
        types = tuple(map(type, tensors))
        if len(types) != len(self._optional) or types[0] is type(None) or not _PLAIN.issuperset(types):
            return None
        if function_modes() or profiler_is_on() or needs_derivative(tensors):
            return None
        if True in [x.is_neg() for x in tensors if x is not None]:
            return None
        written = None if self._writes is None else tensors[self._writes]
        if self._writes is not None and (written is None or written.is_inference()):
            return None
        state = (types, tensors[0].device.type, dispatch_state(), *options, *map(type, options.values()))
        if state not in self._backends:
            right = self._is_complete(types, options)
            self._backends[state] = backend_key(tensors[0]) if right else None
        backend = self._backends[state]
        return None if backend is None else self._kernels.get(backend)

    def _is_complete(self, types: tuple[type, ...], options: Mapping[str, Any]) -> bool:
        """Whether nothing is left out or to be converted, going by types."""
        known, required = self._options.keys(), self._options.keys() - {"o_layout"}  # which alone has a default
        if not required <= options.keys() <= known:
            return False
        given = all(may or kind is not type(None) for may, kind in zip(self._optional, types, strict=True))
        return given and all(type(value) in _OPTION_TYPES[self._options[name]] for name, value in options.items())

    def run(self, kernel: Kernel, tensors: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        """What the kernels of autograd and of the version counter would do."""
        if self._writes is not None:
            count_write(tensors[self._writes])
        with below_version_counter():
            return kernel(*tensors, **options)


_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, type(None)))
_OPTION_TYPES = {
    "float": (float,), "bool": (bool,), "str": (str,), "int": (int,), "ScalarType?": (torch.dtype, type(None)),
}  # fmt: skip


# What a torch_dispatch handler (a mode such as FlopCounterMode, a subclass such as DTensor) switches off around the ops
# it calls, and differentiation by functorch needs.
_DIFFERENTIATION_KEYS = (
    DispatchKey.AutogradFunctionality,
    DispatchKey.AutogradOther,
    DispatchKey.AutogradNestedTensor,
    DispatchKey.ADInplaceOrView,
    DispatchKey.FuncTorchDynamicLayerFrontMode,
    DispatchKey.FuncTorchDynamicLayerBackMode,
    DispatchKey.FuncTorchGradWrapper,
)


@contextlib.contextmanager
def differentiation() -> Generator[None]:
    """A context in which ``torch.func.vjp`` works wherever a kernel was called from.

    Hooks for saved tensors, as of ``torch.autograd.graph.save_on_cpu``, are for what the caller's graph saves: not for
    what is computed here, and torch.func refuses to work under them.
    """
    with no_saved_tensors_hooks(), without_keys_excluded(_DIFFERENTIATION_KEYS):
        yield

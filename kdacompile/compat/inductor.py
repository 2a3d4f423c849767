"""Inductor as this package drives it: its compiler, its options and modes, its caches and its passes."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
import torch._inductor
from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.utils._python_dispatch import _disable_current_modes

log = logging.getLogger(__name__)

PASS_OPTION = "pre_grad_custom_pass"


def compile_fx(gm: fx.GraphModule, inputs: Sequence[Any], config_patches: dict[str, Any]) -> Callable[..., Any]:
    """Inductor itself; a graph module in gives a function back."""
    from torch._inductor import compile_fx as inductor  # slow to import

    compiled: Any = inductor.compile_fx(gm, inputs, config_patches=config_patches)
    return compiled


@functools.cache
def has_cpp_compiler() -> bool:
    """Whether Inductor finds the C++ compiler that its CPU kernels need."""
    from torch._inductor import cpp_builder

    try:
        return bool(cpp_builder.get_cpp_compiler())
    except (RuntimeError, OSError):  # InvalidCxxCompiler, and on Windows what it makes of a missing cl
        return False


def as_passes(given: object) -> list[Callable[[fx.Graph], object]]:
    """The passes in an Inductor option that takes one, several (since torch 2.13) or none."""
    if given is None:
        return []
    passes = list(given) if isinstance(given, (list, tuple)) else [given]
    return [item for item in passes if callable(item)]


def in_nested_graph() -> bool:
    """Whether the graph that Inductor runs its passes on is nested in one that it has still to run them on: the body of
    a checkpoint, a branch. The pass is given the graph alone, so the answer is on the stack.
    """
    frame, depth = sys._getframe(1), 0
    while frame is not None:
        depth += frame.f_code.co_name == "_recursive_pre_grad_passes"
        frame = frame.f_back
    return depth > 1


def pass_uuid(run: object) -> Any:
    """A pass's identity for caches; None for plain functions."""
    return run.uuid() if isinstance(run, CustomGraphPass) else None


def inductor_option(name: str) -> Any:
    return getattr(inductor_config, name)


def inductor_modes() -> dict[str, dict[str, Any]]:
    """The configuration each of torch.compile's modes stands for."""
    return torch._inductor.list_mode_options()


def inductor_options() -> list[str]:
    return torch._inductor.list_options()


def inductor_option_type(name: str) -> object:
    """What an option is declared as: a type, a union or a subscripted generic."""
    declared: Any = inductor_config  # get_type is installed at run time
    return declared.get_type(name)


def aot_eager(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """AOTAutograd with every operator run as it is."""
    from torch._dynamo.backends.debugging import aot_eager as backend

    return backend(gm, list(inputs))


def inductor_cache_dir() -> str:
    """Where Inductor's caches lie, be it that no folder can be made there: nothing is read or kept then."""
    try:
        return cache_dir()
    except OSError as error:
        _tell_once(f"{error}: nothing is kept of what is compiled; set TORCHINDUCTOR_CACHE_DIR to a folder of your own")
        return os.environ.get("TORCHINDUCTOR_CACHE_DIR", os.path.join(os.devnull, "torchinductor"))


@functools.cache
def _tell_once(what: str) -> None:
    log.warning("%s", what)


def disk_caches() -> bool:
    return not inductor_config.force_disable_caches


def cache_key_tag(tag: str) -> contextlib.AbstractContextManager[Any]:
    """Add ``tag`` to the keys of all compile caches, beside what the user has put there."""
    config: Any = torch.compiler.config  # its fields are installed at run time
    return config.patch(cache_key_tag=f"{config.cache_key_tag}{tag}")


def no_fake_modes() -> contextlib.AbstractContextManager[Any]:
    """Inductor runs passes under its own fake mode; work on plain meta tensors means leaving it."""
    return _disable_current_modes()


def aoti_load_package(path: Any, **options: Any) -> Any:
    """A package of AOTInductor's, as a function."""
    return torch._inductor.aoti_load_package(path, **options)


def no_python_dispatcher() -> contextlib.AbstractContextManager[Any]:
    """Inductor runs its passes with torch's Python dispatcher on: operators then decompose otherwise than they do under
    other compilers, and a matmul of real tensors takes six times as long.
    """
    guard: Any = torch._C._DisablePythonDispatcher()
    return guard


@contextlib.contextmanager
def no_saved_tensors_hooks() -> Generator[None]:
    """What autograd saves here is none of the caller's: checkpointing counts what its hooks are shown, and graphs are
    compiled under them. Nor does torch.func differentiate beside hooks.
    """
    native: Any = torch._C  # its stubs do not name the module
    taken: list[Any] = []
    while (hooks := native._autograd._top_saved_tensors_default_hooks(True)) is not None:
        native._autograd._pop_saved_tensors_default_hooks()
        taken.append(hooks)
    try:
        yield
    finally:
        for hooks in reversed(taken):
            native._autograd._push_saved_tensors_default_hooks(*hooks)

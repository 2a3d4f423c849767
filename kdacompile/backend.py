"""``torch.compile(model, backend="kda")``: Inductor, with linear attention rewritten before it starts."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from kdacompile import compat, compiler_pass
from kdacompile.settings import Settings, parse


@functools.cache
def source_fingerprint() -> str:
    """A hash of every file that decides what is rewritten and how it runs, and of the libraries' versions."""
    digest = hashlib.sha256()
    import kdacompile.lowering
    import kdacompile.patterns

    for package in (kdacompile, kdacompile.patterns, kdacompile.lowering):
        root = Path(str(package.__file__)).parent
        for path in sorted(root.rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode())
            digest.update(path.read_bytes())
    digest.update(torch.__version__.encode())
    return digest.hexdigest()


class KdaPass(compat.CustomGraphPass):
    """The rewrite as Inductor's pre-grad pass. Inductor runs it on nested graphs itself, so it does not recurse."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.ran = False

    def __call__(self, graph: fx.Graph) -> None:
        self.ran = True
        compiler_pass.run(graph.owning_module, self.settings)

    def uuid(self) -> Any:
        return f"kdacompile-{source_fingerprint()}-{self.settings.fingerprint()}"


def kda(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The backend function; ``mode`` and ``options`` as torch.compile hands them over (see ``settings.parse``)."""
    settings = parse(mode, options)
    if settings.inner == "inductor":
        return _inductor(gm, example_inputs, settings)
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            compiler_pass.run(module, settings)
    if settings.inner == "eager":
        return gm.forward
    from torch._dynamo.backends.debugging import aot_eager

    return aot_eager(gm, example_inputs)


def _inductor(gm: fx.GraphModule, example_inputs: Sequence[Any], settings: Settings) -> Callable[..., Any]:
    run = KdaPass(settings)
    patches = {**settings.inductor_patches(), "pre_grad_custom_pass": run}
    # torch 2.11 leaves the pass's uuid out of the AOT cache key; the tag is in it on every version.
    with torch.compiler.config.patch(cache_key_tag=run.uuid()):  # type: ignore[attr-defined]
        return compat.compile_fx(gm, example_inputs, config_patches=patches)

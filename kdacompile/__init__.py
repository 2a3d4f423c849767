"""kdacompile: ``torch.compile(model, backend="kda")`` proves and fuses linear attention; Inductor compiles the rest.

The backend needs no import: torch finds it through the ``torch_dynamo_backends`` entry point. Importing this package
is for :func:`explain`, for reading reports and for the functional API in :mod:`kdacompile.ops`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kdacompile import ops
    from kdacompile.backend import inductor_pass, load_package
    from kdacompile.errors import KdaError, StrictError
    from kdacompile.explainer import explain
    from kdacompile.plans import plan
    from kdacompile.report.collect import collecting
    from kdacompile.report.findings import Match, Rejection
    from kdacompile.report.report import Report

__version__ = "0.1.0"

__all__ = [
    "KdaError",
    "Match",
    "Rejection",
    "Report",
    "StrictError",
    "__version__",
    "collecting",
    "explain",
    "inductor_pass",
    "load_package",
    "ops",
    "plan",
]

# Loaded on first use, for two reasons: ``python -m kdacompile doctor`` must be able to say why ``import torch`` itself
# fails (a torch_npu without CANN does that), and importing the package must not cost a second of torch.
_HOME = {
    "KdaError": "kdacompile.errors",
    "StrictError": "kdacompile.errors",
    "Match": "kdacompile.report.findings",
    "Rejection": "kdacompile.report.findings",
    "Report": "kdacompile.report.report",
    "collecting": "kdacompile.report.collect",
    "explain": "kdacompile.explainer",
    "inductor_pass": "kdacompile.backend",
    "load_package": "kdacompile.backend",
    "plan": "kdacompile.plans",
}


def __getattr__(name: str) -> Any:
    if name == "ops":
        return importlib.import_module("kdacompile.ops")
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

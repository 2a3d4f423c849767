"""Ahead-of-time compilation: the pass on exported graphs, and a package that runs with our op in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import kdacompile
from kdacompile.errors import OptionTypeError, StrictError, UnknownOptionError
from kdacompile.report.collect import collecting
from tests.backend.layers import Layer, patterns
from tests.compare import relative_error


def exported(model: nn.Module, *, dynamic: bool = False) -> torch.export.ExportedProgram:
    shapes: Any = {"x": {0: torch.export.Dim("batch", min=2, max=64)}} if dynamic else None
    with torch.no_grad():
        return torch.export.export(model.eval(), (torch.randn(3, 5, 12),), dynamic_shapes=shapes)


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_pass_rewrites_an_exported_graph(dynamic: bool) -> None:
    model = Layer()
    module = exported(model, dynamic=dynamic).module()
    with torch.no_grad(), collecting() as report:
        kdacompile.inductor_pass()(module.graph)
        module.recompile()
        for batch in (3, 5) if dynamic else (3,):
            x = torch.randn(batch, 5, 12)
            assert relative_error(module(x), model(x)) < 1e-5
    assert patterns(report) == ["gated_delta_rule"]
    assert "kdacompile.linear_attention.default" in module.code


def test_a_package_runs_the_op(tmp_path: Path) -> None:
    """The op is defined in Python: whoever loads the package needs a Python with ``kdacompile.ops`` imported."""
    model = Layer()
    configs = {
        "pre_grad_custom_pass": kdacompile.inductor_pass(expect={"gated_delta_rule": 1}),
        # Half the compiler's time: one small model is compiled, once.
        "aot_inductor.compile_wrapper_opt_level": "O0",
        "aot_inductor.precompile_headers": False,
        "cpp_cache_precompile_headers": False,
    }
    with torch.no_grad(), collecting() as report:
        path = torch._inductor.aoti_compile_and_package(
            exported(model, dynamic=True), package_path=str(tmp_path / "layer.pt2"), inductor_configs=configs
        )
        package = kdacompile.load_package(path)
        for batch in (3, 7):
            x = torch.randn(batch, 5, 12)
            assert relative_error(package(x), model(x)) < 1e-5
    assert patterns(report) == ["gated_delta_rule"]


def test_options_are_checked() -> None:
    with pytest.raises(UnknownOptionError, match="strct"):
        kdacompile.inductor_pass(strct=True)
    with pytest.raises(OptionTypeError, match="strict"):
        kdacompile.inductor_pass(strict="yes")
    with pytest.raises(UnknownOptionError, match="inner"):
        kdacompile.inductor_pass(inner="eager")


def test_strict_holds_for_exported_graphs() -> None:
    module = exported(nn.Sequential(nn.Linear(12, 12))).module()
    with pytest.raises(StrictError):
        kdacompile.inductor_pass(strict=True)(module.graph)

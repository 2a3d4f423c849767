from __future__ import annotations

import inspect
import pickle
from typing import Any

import pytest
import torch

from kdacompile import errors
from kdacompile.errors import CompileError, KdaError, StrictError, UnknownOptionError


def test_every_error_is_a_kda_error_with_a_docstring() -> None:
    found = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if cls.__module__ == errors.__name__]
    assert len(found) > 5
    for cls in found:
        assert issubclass(cls, KdaError)
        assert cls.__doc__


def test_fields_stay_readable_and_survive_pickling() -> None:
    error = UnknownOptionError(key="kda.x", hint="")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is UnknownOptionError
    assert again.fields == error.fields == {"key": "kda.x", "hint": ""}
    strict = pickle.loads(pickle.dumps(StrictError(problem="two missing", reasons=["a", "b"])))
    assert strict.reasons == ("a", "b")
    assert str(strict) == "two missing\n  - a\n  - b"


@pytest.mark.parametrize("error", [StrictError(problem="nothing matched"), UnknownOptionError(key="kda.x", hint="")])
def test_an_error_of_the_backend_reaches_the_user_as_itself(error: CompileError) -> None:
    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        raise error

    with pytest.raises(type(error)):
        torch.compile(torch.sin, backend=backend)(torch.ones(2))

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kdacompile import errors, explain, plan
from kdacompile.errors import CompileError, KdaError, OptionTypeError, StrictError, SubjectError, UnknownOptionError
from kdacompile.lowering.errors import ArgumentError
from kdacompile.ops import linear_attention, mla
from kdacompile.ops.errors import ContextParallelError, OptionError
from kdacompile.settings import parse


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


X = torch.ones(1, 2, 1, 4)
ATTEND: Any = linear_attention
LATENT: Any = mla
EXPLAIN: Any = explain
PLAN: Any = plan
PARSE: Any = parse
WRONG: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: ATTEND(X, X, X, scale="a"), OptionError, "scale must be a number, got 'a'"),
    (lambda: ATTEND(X, X, X, chunk_size="64"), OptionError, "chunk_size must be a number, got '64'"),
    (lambda: ATTEND(X, X, X, context_parallel="cp"), ContextParallelError, "must be a ContextParallel, got str"),
    (lambda: LATENT(X, None, X[:, :, 0], None, scale=[1]), OptionError, "scale must be a number"),
    (
        lambda: LATENT(X, None, X[:, :, 0], None, scale=1.0, context_parallel={}),
        ContextParallelError,
        "must be a ContextParallel, got dict",
    ),
    (lambda: PARSE(None, ["kda.strict"]), OptionTypeError, "option 'options' must be a dict"),
    (lambda: PLAN("kda", T="8192"), ArgumentError, "sizes are whole numbers, got {'T': '8192'}"),
    (lambda: PLAN("kda", C=None), ArgumentError, "sizes are whole numbers, got {'C': None}"),
    (lambda: PLAN("kda", ranks=1.5), ArgumentError, "sizes are whole numbers, got {'ranks': 1.5}"),
    (lambda: PLAN("kda", form="chunks"), ArgumentError, "form must be one of chunk, token, segment, gradients"),
    (lambda: EXPLAIN(None), SubjectError, "cannot explain None: it is neither a function nor a module"),
]


@pytest.mark.parametrize(("call", "error", "said"), WRONG)
def test_what_is_given_wrong_is_named(call: Callable[[], object], error: type[Exception], said: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert said in str(caught.value)

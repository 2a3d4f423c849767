"""``kdacompile explain SUBJECT``: what ``backend="kda"`` does with a function of a file, or with a transformers model.

Three kinds of subject:

- ``model.py:attention --tensor q=1x64x4x32 --tensor k=1x64x4x32:bf16``: a function of a file, called with random
  tensors by name (normally distributed; zeros and ones for bool and int64);
- ``model.py:make``: a function without parameters that returns a callable and the tuple, or dict, of its arguments;
- ``kimi_linear``: a transformers model type. Its configuration keeps every width, but has one layer of each kind, few
  experts and a small vocabulary, and its weights are random: what matches depends on none of that.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import logging
import os
import sys
import traceback
import warnings
import webbrowser
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor

from kdacompile.commands import console
from kdacompile.doctor import device_problem
from kdacompile.errors import KdaError, MissingDependencyError, SubjectError
from kdacompile.explainer import explain
from kdacompile.report.collect import collecting

_DTYPES = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int64": torch.int64,
    "bool": torch.bool,
}
_VOCABULARY, _EXPERTS = 1024, 16
_LAYER_KINDS = ("layer_types", "layers_block_type", "block_types")
_EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_LIBRARIES = tuple(
    f"{place}{os.sep}"
    for folder in (Path(torch.__file__).parent, Path(__file__).parents[1])
    for place in (folder, folder.resolve())
)

Call = tuple[Callable[..., Any], Sequence[Any], dict[str, Any]]


def main(arguments: Any) -> int:
    """``arguments`` as parsed in ``__main__``. Exit status 1 where nothing matched, 130 where somebody stopped it."""
    torch.manual_seed(0)
    fn, args, kwargs = subject(arguments.subject, arguments.tensor, arguments.tokens, arguments.device)
    doing = console.progress("capturing, matching and checking")
    blame = _Told(arguments.subject, "calling it raises", again=lambda: fn(*args, **kwargs))
    with collecting() as report:
        try:
            with torch.set_grad_enabled(arguments.train), warnings.catch_warnings(), blame, doing:
                warnings.filterwarnings("ignore", module=r"torch\._dynamo")  # what it thinks of the model's libraries
                logging.getLogger("torch._subclasses.fake_tensor").disabled = True  # tracebacks of sizes that differ
                report = explain(fn, timed=not arguments.no_time)(*args, **kwargs)
        except KeyboardInterrupt:  # what was found until then is in the outer report
            report.title, stopped = f"{arguments.subject}, stopped", True
        else:
            stopped = False
    if arguments.json:
        print(report.to_json())
    else:
        console.show_report(report)
    if arguments.svg:
        console.draw_report(report, arguments.svg)
    if arguments.html or arguments.open:
        page = arguments.html or Path("kdacompile-report.html")
        page.write_text(report.to_html(), encoding="utf-8")
        print(f"written to {page}", file=sys.stderr)
        if arguments.open:
            webbrowser.open(page.resolve().as_uri())
    if stopped:
        return 130
    return 0 if report.matches else 1


def subject(name: str, tensors: Sequence[str], tokens: int, device: str) -> Call:
    """What to call, and with what.

    Raises :class:`~kdacompile.errors.SubjectError` where the name says nothing that can be run.
    """
    problem = device_problem(device)
    if problem is not None:
        raise SubjectError(subject=name, problem=problem)
    file, _, function = name.rpartition(":")
    if file.endswith(".py"):
        return _from_file(Path(file), function, tensors, device)
    if name.endswith(".py"):
        raise SubjectError(subject=name, problem=f"name a function as well: {name}:FUNCTION")
    if tensors:
        raise SubjectError(subject=name, problem="--tensor is for functions of a file")
    return _from_transformers(name, tokens, device)


# -- a function of a file ---------------------------------------------------------------------------------------------


def _from_file(path: Path, function: str, tensors: Sequence[str], device: str) -> Call:
    subject = f"{path}:{function}"
    fn = getattr(_module(path), function, None)
    if not callable(fn):
        raise SubjectError(subject=subject, problem=f"{path} has no function {function!r}")
    if inspect.isclass(fn):
        problem = f"it is a class: name a function that returns an instance, {function}(...), and its arguments"
        raise SubjectError(subject=subject, problem=problem)
    signature = inspect.signature(fn.forward if isinstance(fn, torch.nn.Module) else fn)
    wanted = [p.name for p in signature.parameters.values() if p.default is p.empty and p.kind not in _VARIADIC]
    hint = " ".join(f"--tensor {name}=1x64x4x32" for name in wanted)
    if tensors:
        given = dict(_tensor(text, device) for text in tensors)
        if len(given) < len(tensors):
            raise SubjectError(subject=subject, problem="a name is given to more than one --tensor")
        try:
            signature.bind(**given)
        except TypeError as error:
            raise SubjectError(
                subject=subject, problem=f"{error}; what it must be given: {hint or 'no tensor by name'}"
            ) from error
        return fn, (), given
    if wanted:
        raise SubjectError(subject=subject, problem=f"it has parameters: give their shapes ({hint})")
    with _Told(subject, "it raises"):
        made = fn()
    match made:
        case (called, list() | tuple() as args) if callable(called):
            return called, tuple(cast("Sequence[Any]", args)), {}
        case (called, dict() as kwargs) if callable(called):
            return called, (), cast("dict[str, Any]", kwargs)
        case _:
            problem = "it must return a callable and the tuple, or dict, of its arguments"
            raise SubjectError(subject=subject, problem=problem)


def _module(path: Path) -> ModuleType:
    if not path.is_file():
        raise SubjectError(subject=str(path), problem="there is no such file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None  # for a file that ends in .py there always is one
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent.resolve()))  # as `python model.py` would have it
    with _Told(str(path), "running the file raises"):
        spec.loader.exec_module(module)
    return module


class _Told:
    """An exception of the subject's own code as a :class:`SubjectError` that names its line.

    ``again`` does the same without a compiler: if it raises too, its exception is the clearer one.
    """

    def __init__(self, subject: str, what: str, again: Callable[[], object] | None = None) -> None:
        self.subject, self.what, self.again = subject, what, again

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, SystemExit):
            raise SubjectError(subject=self.subject, problem=f"it ends the process with status {error.code}")
        if not isinstance(error, Exception) or isinstance(error, KdaError):
            return
        try:
            if self.again is not None:
                self.again()
        except Exception as plain:  # noqa: BLE001 - whatever the subject raises
            error = plain
        text = (str(error).strip().splitlines() or [""])[0]
        problem = f"{self.what} {type(error).__name__}: {text}{_place(error)}"
        raise SubjectError(subject=self.subject, problem=problem) from error


def _place(error: Exception) -> str:
    """The last line of the subject's own code, if there is one."""
    if isinstance(error, SyntaxError):
        return f" at {error.filename}:{error.lineno}" if error.filename else ""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((*_LIBRARIES, "<"))]
    return f" at {own[-1].filename}:{own[-1].lineno}" if own else ""


def _tensor(text: str, device: str) -> tuple[str, Tensor]:
    """``q=1x64x4x32:bf16`` as a name and a random tensor."""
    name, _, shape_and_dtype = text.partition("=")
    shape, _, dtype_name = shape_and_dtype.partition(":")
    dtype = _DTYPES.get(dtype_name or "fp32")
    if dtype is None or not name.isidentifier() or not all(size.isdecimal() for size in shape.split("x")):
        raise SubjectError(subject=text, problem=f"tensors are written like q=1x64x4x32:bf16 ({', '.join(_DTYPES)})")
    sizes = [int(size) for size in shape.split("x")]
    try:
        random = (
            torch.randn(sizes, device=device) if dtype.is_floating_point else torch.randint(2, sizes, device=device)
        )
    except RuntimeError as error:  # more than there is memory
        raise SubjectError(subject=text, problem=str(error).strip().splitlines()[0]) from error
    return name, random.to(dtype)


# -- a transformers model ---------------------------------------------------------------------------------------------


def _from_transformers(name: str, tokens: int, device: str) -> Call:
    try:
        import transformers
    except ImportError as error:
        raise MissingDependencyError(
            what=f"explain {name}", package="transformers", install="'kdacompile[models]'"
        ) from error
    transformers.logging.set_verbosity_error()  # it warns that kernels are missing which kdacompile replaces
    if name not in transformers.CONFIG_MAPPING:
        raise SubjectError(subject=name, problem=_no_model_type(name, list(transformers.CONFIG_MAPPING)))
    try:
        config = small(transformers.AutoConfig.for_model(name).get_text_config())
        with torch.device(device):
            model = transformers.AutoModel.from_config(config, dtype=torch.bfloat16).eval()
    except (TypeError, ValueError, AttributeError, KeyError) as error:  # its defaults are no model, or not this small
        problem = f"transformers cannot build it from its default configuration ({type(error).__name__}: {error})"
        raise SubjectError(subject=name, problem=f"{problem}; build it in a file, and name FILE.py:FUNCTION") from error
    print(f"{type(model).__name__}: {config.num_hidden_layers} layers, random weights", file=sys.stderr)
    return model, (torch.randint(3, _VOCABULARY, (1, tokens), device=device),), {"use_cache": False}


def _no_model_type(name: str, known: Sequence[str]) -> str:
    last = name.rpartition("/")[2].lower().replace("-", "_")  # of a repository of weights
    near = difflib.get_close_matches(last, known, n=3) or [each for each in known if last.startswith(each)][:3]
    meant = f"; did you mean {' or '.join(near)}?" if near else "; config.json of a model names its model_type"
    return f"neither FILE.py:FUNCTION nor a model type of transformers{meant}"


def small(config: Any) -> Any:
    """The configuration with one layer of each kind, few experts and a small vocabulary; widths stay as they are."""
    layers = config.num_hidden_layers
    kinds = next((list(found) for name in _LAYER_KINDS if (found := getattr(config, name, None))), ["layer"])
    kept = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    for name, value in config.to_dict().items():
        if isinstance(value, list) and len(cast("list[Any]", value)) == layers:
            setattr(config, name, [value[index] for index in kept])
    config.num_hidden_layers = len(kept)
    _mend(config, [kinds[index] for index in kept])
    for name in _EXPERT_COUNTS:
        if getattr(config, name, None) is not None:
            setattr(config, name, min(getattr(config, name), _EXPERTS))
    config.vocab_size = _VOCABULARY
    config.pad_token_id, config.bos_token_id, config.eos_token_id = 0, 1, 2
    return config


def _mend(config: Any, kinds: list[str]) -> None:
    """What follows from the kinds of layers kept, and defaults of transformers that are no model."""
    if not config.num_hidden_layers:  # a layer of LongCat's counts as two
        config.num_hidden_layers = 2 * len(kinds)
    if getattr(config, "hybrid_layer_ids", None) is not None:  # Zamba 2 has its layers' kinds a second time
        config.hybrid_layer_ids = [place for place, kind in enumerate(kinds) if kind == "hybrid"]
    if getattr(config, "num_experts_per_tok", 1) is None:  # DeepSeek V2
        config.num_experts_per_tok = 2
    width = getattr(config, "moe_intermediate_size", None) or 0
    if width % 8:  # 1407 of DeepSeek V2: torch's grouped products want rows of 16 bytes
        config.moe_intermediate_size = width + -width % 8

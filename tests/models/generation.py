"""transformers as people call it: default attention, a padded batch, ``generate()``; tokens, matches and compilations.

One cell is one model and one way to generate: greedy with a growing or a static cache, beam search, or assisted by the
prompt's own n-grams, which verifies several tokens at once. A cell passes when the tokens are eager's, every attention
and every linear-attention layer is matched in every compilation, and these are three at most, or no more than
torch.compile has by itself: an assistant's guesses come in all lengths.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter  # torch-private: counts the graphs of a backend that does nothing

from kdacompile.errors import KdaError
from kdacompile.report.collect import collecting
from tests.models import mla_zoo, zoo

PROMPT, NEW = 17, 64
COMPILATIONS = 3
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "static": {"cache_implementation": "static", "disable_compile": True},  # the model's forward is compiled already
    "beam": {"num_beams": 3},
    "assisted": {"prompt_lookup_num_tokens": 3},
}


@dataclass(frozen=True)
class Cell:
    model: str
    way: str

    def __str__(self) -> str:
        return f"{self.model}-{self.way}"


@dataclass(frozen=True)
class Row:
    cell: Cell
    matched: tuple[int, ...]
    """By compilation."""
    expected: int
    seconds: float
    problems: tuple[str, ...] = ()

    def __str__(self) -> str:
        verdict = "ok" if not self.problems else "FAIL " + "; ".join(self.problems)
        found = "+".join(map(str, self.matched)) or "0"
        return f"{self.cell.model:<18}{self.cell.way:<10}{self.expected:>3}  {found:<14}{self.seconds:>7.1f}  {verdict}"


def names() -> list[str]:
    """Models with latent attention, and with linear attention."""
    return list(dict.fromkeys([*mla_zoo.CASES, *zoo.CASES]))


def cells(models: Sequence[str], ways: Sequence[str]) -> Iterator[Cell]:
    for name in models:
        static = name in mla_zoo.CASES and mla_zoo.CASES[name].static_cache
        for way in ways:
            if static or way not in ("static", "assisted"):  # models with a state have no cache that can be cut back
                yield Cell(name, way)


def build(name: str) -> tuple[Any, int]:
    """A small model in its default attention, and how many of its layers are of the family."""
    if name in mla_zoo.CASES:
        case = mla_zoo.CASES[name]
        return case.build(case.implementations()[-1]), case.attentions + bool(case.linear)
    return zoo.CASES[name].build(attention="eager" if name == "mamba2" else "sdpa"), zoo.CASES[name].layers


def prompt() -> dict[str, Tensor]:
    """Two requests, one of them padded on the left; their ends repeat, so that an assistant has something to copy."""
    ids = mla_zoo.tokens(PROMPT)
    ids[:, -4:] = ids[:, -8:-4]
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generate(model: Any, way: str) -> Tensor:
    """The tokens of ``generate()``; of a text model without a head, of the same loop written out."""
    given = prompt()
    if not hasattr(model, "lm_head"):
        return _loop(model, **given)
    if way == "assisted":  # transformers asks for a batch of one
        given = {name: value[1:] for name, value in given.items()}
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return model.generate(**given, max_new_tokens=NEW, do_sample=False, **WAYS[way])


def _loop(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    cache = mla_zoo.DynamicCache(config=model.config)
    tokens, given = input_ids, input_ids
    positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)
    for _ in range(NEW):
        hidden = model(
            input_ids=given,
            attention_mask=attention_mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        )[0]
        given = hidden[:, -1:].argmax(-1)
        tokens = torch.cat([tokens, given], 1)
        attention_mask = torch.cat([attention_mask, torch.ones_like(given)], 1)
        positions = positions[:, -1:] + 1
    return tokens


def measure(cell: Cell, inner: str = "eager") -> Row:
    """Generate with a compiled model and with eager; a compile that raises becomes a failed row."""
    model, layers = build(cell.model)
    torch._dynamo.reset()
    with torch.no_grad():
        expected = generate(copy.deepcopy(model), cell.way)
        model.forward = torch.compile(model.forward, backend="kda", options={"kda.inner": inner})
        started = time.perf_counter()
        try:
            with collecting() as report:
                found = generate(model, cell.way)
        except (KdaError, RuntimeError) as error:  # Dynamo's and Inductor's own errors are RuntimeErrors
            text = f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"
            return Row(cell, (), layers, 0.0, (text,))
    seconds = time.perf_counter() - started
    matched = tuple(len(graph.matches) for graph in report.graphs)
    problems: list[str] = []
    if not torch.equal(found, expected):
        problems.append("other tokens than eager's")
    whole = all(count == layers for count in matched)
    if not whole and (sum(matched) % layers or sum(matched) < 2 * layers or _graphs_alone(cell) == 1):
        problems += ["not every layer is matched", *dict.fromkeys(str(rejection) for rejection in report.rejections)]
    more = 0 if whole else COMPILATIONS
    if len(matched) > COMPILATIONS and len(matched) > _graphs_alone(cell) + more:
        problems.append(f"{len(matched)} compilations, where torch.compile alone needs {_graphs_alone(cell)}")
    return Row(cell, matched, layers, seconds, tuple(problems))


@cache
def _graphs_alone(cell: Cell) -> int:
    """How many graphs a backend that does nothing gets: more than one, where a model cuts its graph by itself."""
    model, _ = build(cell.model)
    counter = CompileCounter()
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend=counter)
    with torch.no_grad():
        generate(model, cell.way)
    return counter.frame_count

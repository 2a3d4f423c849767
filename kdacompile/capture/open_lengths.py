"""Lengths that the next call brings anew: of prompts in inference, and of caches that grow.

Dynamo captures the first prompt for the length it happens to have, and only the second with an open length. So it does
with a decoding step, which concatenates its cache and the new token and returns the result to be the next step's
cache. Where the graph is one that is rewritten, the length is opened at once: one graph serves all prompts, and one all
steps. Of prompts, those through attention over a latent are looked for here; what recurrences do to theirs is the
business of ``lift``.

Where a function that may be linear attention is called, the region is captured further than torch.compile captures it:
past operators whose result's size depends on data, and for any count of chunks or pools
(``compat.region``). Its layers are one graph then, which serves every length. A graph with nothing to rewrite is
captured again as torch.compile does it, and so is one that the compiler behind this backend refuses. glm5_next keeps
rows by a boolean mask, at which its first prompt would be cut into ten graphs, and from the ninth prompt on its layers
would have used up their recompilations and run in eager mode (docs/lengths.md). This goes once torch.compile captures
such masks by itself, which ``capture_dynamic_output_shape_ops`` switches on for a process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path

import torch
from torch import fx

from kdacompile import compat
from kdacompile.compat import bases, region, sizes
from kdacompile.graph import prefilter
from kdacompile.ops.definitions import mla
from kdacompile.search.compiler_pass import Analysis
from kdacompile.settings import Settings
from kdacompile.store.disk import read_checked, source_fingerprint, write_checked


def open_lengths(analysis: Analysis) -> None:
    """Have lengths that will change captured open; does not return if that takes another capture.

    Does nothing to a graph that has nothing to rewrite.
    """
    graph = analysis.captured
    lengths, prompts = set(_of_caches(graph)), _of_prompts(graph)
    if not lengths and not prompts:
        return
    if prompts or not any(map(compat.is_own_op, graph.nodes)):
        result = analysis.result
        lengths = lengths if result.found else set[int]()
        lengths |= prompts & set(_of_queries(result.graph))
    kept = set(prefilter.last_rows(graph)) if lengths else set[int]()
    open_up([*sizes.as_open(sizes.of_size(graph, lengths)), *sizes.numbers(kept)], analysis.settings)


def _of_caches(graph: fx.Graph) -> Iterator[int]:
    """What growing caches measure, and what they grow to, as masks do, where that is captured as a number."""
    for node in prefilter.concatenated(graph):
        dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
        after = compat.example_value(node)
        for before in (compat.example_value(each) for each in node.all_input_nodes if each.op == "placeholder"):
            if before.dim() != after.dim():  # nothing yet: torch.cat takes an empty tensor of one dimension for that
                continue
            length, total = before.shape[dim], after.shape[dim]
            if isinstance(length, int) and length > 1:
                yield length
                if isinstance(total, int):  # it is open already where the number of new tokens is
                    yield total


def _of_prompts(graph: fx.Graph) -> set[int]:
    """How many tokens a prompt could have, if this is one and its length is captured as a number.

    Batches to train on are usually cut to one length.
    """
    if torch.is_grad_enabled():
        return set()
    lengths = set(prefilter.heads_and_queries(graph))
    given = sizes.of_size(graph, lengths)
    known = {compat.example_value(node).shape[dim] for node, dims in given for dim in dims}
    return known if known and prefilter.may_expand_a_latent(graph) else set()


def _of_queries(graph: fx.Graph) -> Iterator[int]:
    """How many queries the ops in a rewritten graph have; open numbers left out."""
    for node in graph.find_nodes(op="call_function", target=mla):
        tokens = compat.example_value(node.args[0]).shape[1]
        if isinstance(tokens, int):
            yield tokens


def forget_bases(analysis: Analysis) -> None:
    """A step compiled over a cache that was cut back, as assisted generation does, serves whole caches as well."""
    if analysis.prospects.grows and not torch.is_grad_enabled():
        bases.forget()


# -- regions captured further ------------------------------------------------------------------------------------------


def keep_if_rewritten(analysis: Analysis) -> None:
    """Does not return if the graph was captured further for nothing: no function was replaced, and nothing will be. Nor
    if torch has assumed a size that it could not tell, which may be wrong when the graph runs; nor if it was not asked
    whether a count of chunks is one, and no function was replaced, as in a step: results that the graph makes of chunks
    lie in memory otherwise where there is a single one, and it is asked in another capture.
    """
    if not region.is_used():
        return
    assumed = any(map(compat.is_assumption, analysis.captured.nodes))
    replaced = any(map(compat.is_own_op, analysis.captured.nodes))
    if assumed or not (replaced or analysis.result.found):
        raise region.capture_as_ever()
    if not replaced and region.leaves_counts_open():
        raise region.tell_counts()


def give_up() -> None:
    """Does not return if the graph was captured further than torch.compile does."""
    if region.is_used():
        raise region.capture_as_ever()


@contextlib.contextmanager
def given_up_where_refused() -> Generator[None]:
    """Errors of the compiler about a graph that was captured further have it captured again."""
    try:
        with region.with_its_backward():
            yield
    except region.refusals() as error:
        if not region.is_used():
            raise
        raise region.capture_as_ever() from error


# -- sizes that are captured open -------------------------------------------------------------------------------------
# They are noted, which starts the capture anew, and remembered on disk: a second process begins with what the first
# one learnt, and its first attempt is the last. All that a region can be told by before it is captured is its code
# and the kinds of modules it is called with; a size that is left open without need is no error, only a graph for more
# sizes.


def open_up(found: Iterable[sizes.Open], settings: Settings) -> None:
    """Have these sizes and numbers of a region's inputs captured open; does not return if that takes another capture.

    To be called while Dynamo captures the graph or hands it to its backend.
    """
    news = sizes.note(found)
    if not news:
        return
    path = _path(settings)
    if path is not None:
        write_checked(path, json.dumps([*_load(path), *news]))
    raise sizes.capture_again("kdacompile: a size that will change is captured open")


def recall(settings: Settings) -> None:
    """Open what was opened in this region by an earlier process, when its capture begins."""
    path = _path(settings)
    news = [] if path is None else sizes.note(_load(path))
    if not sizes.inputs().isdisjoint(each.source for each in news):
        raise sizes.capture_again("kdacompile: a size that an earlier process has opened is captured open")


def _path(settings: Settings) -> Path | None:
    """Where the sizes of the region that this thread captures are kept; None if they are not."""
    region = sizes.region() if compat.disk_caches() else ""
    if not region:
        return None
    policy = (settings.lift, settings.disable, torch.is_grad_enabled())
    digest = hashlib.sha256("\n".join([region, repr(policy), source_fingerprint()]).encode())
    return Path(compat.inductor_cache_dir()) / "kdacompile" / "opened" / f"{digest.hexdigest()[:32]}.json"


def _load(path: Path) -> list[sizes.Open]:
    body = read_checked(path)
    return [] if body is None else [sizes.Open(source, rank, tuple(dims)) for source, rank, dims in json.loads(body)]

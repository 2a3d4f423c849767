"""A failing program as a script that needs nothing of the tests; its inputs lie beside it."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.fuzz.judge import Verdict
from tests.fuzz.recipes import Recipe

_TAIL = """

if __name__ == "__main__":
    import sys
    from pathlib import Path

    import kdacompile
    from kdacompile.report.collect import collecting
    from torch.utils._pytree import tree_leaves

    def outcome(fn, arguments):
        given = [x.clone() for x in arguments]
        given = [x.requires_grad_() for x in given] if {gradients} else given
        with torch.set_grad_enabled({gradients}):
            results = [x for x in tree_leaves(fn(*given)) if isinstance(x, torch.Tensor)]
        if not {gradients}:
            return [*results, *given]
        loss = sum(x.sum() for x in results if x.requires_grad)
        return [*results, *torch.autograd.grad(loss, given, allow_unused=True, materialize_grads=True)]

    options = {{"kda.inner": "{inner}"}}
    compiled = torch.compile(program, backend="kda", options=options, dynamic={dynamic})
    with collecting() as report:
        for arguments in torch.load(Path(__file__).with_suffix(".pt")):
            for ours, eager in zip(outcome(compiled, arguments), outcome(program, arguments), strict=True):
                gap = (ours - eager).masked_fill(~eager.isfinite(), 0).norm() / eager.nan_to_num(0, 0, 0).norm()
                print(tuple(eager.shape), "relative error", float(gap.detach()), ours.stride(), eager.stride())
    print(report)
"""


def write(recipe: Recipe, verdict: Verdict, path: Path) -> None:
    """``path`` (``.py``) and its inputs beside it (``.pt``)."""
    said = " ".join(verdict.detail.split())
    head = f'"""{verdict.kind}: {said}\n\n{recipe}\n"""\n\nimport torch\n\nDTYPE = torch.{recipe.dtype}\n'
    tail = _TAIL.format(gradients=recipe.gradients, inner=recipe.inner, dynamic=recipe.dynamic)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(head.replace("\\", "\\\\") + recipe.text + tail)
    torch.save([recipe.arguments(call) for call in recipe.calls], path.with_suffix(".pt"))

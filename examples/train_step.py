"""Training through backend="kda": a small language model of hand-written KDA layers learns sequences of period four.

    python examples/train_step.py [--quick] [--device cuda]

Gradients of the first step must equal eager's, and the loss must fall.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if __package__:
    from examples import _common as common
    from examples.own_model import KimiDeltaAttention
else:
    import _common as common
    from own_model import KimiDeltaAttention

VOCABULARY = 16
Step = Callable[[Tensor], Tensor]


class LanguageModel(nn.Module):
    """Embedding, KDA layers with residuals and norms, and a head; forward returns the next-token loss."""

    def __init__(self, layers: int, hidden: int, heads: int, head_dim: int, chunk: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, hidden)
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(layers))
        self.mixers = nn.ModuleList(KimiDeltaAttention(hidden, heads, head_dim, chunk) for _ in range(layers))
        self.head = nn.Linear(hidden, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens[:, :-1])
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            x = x + mixer(norm(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def batch(size: int, length: int, device: str, seed: int) -> Tensor:
    """Four random tokens over and over: predictable from memory alone."""
    generator = torch.Generator().manual_seed(seed)
    period = torch.randint(VOCABULARY, (size, 4), generator=generator)
    return period.repeat(1, -(-length // 4))[:, :length].to(device)


def gradients(model: nn.Module, step: Step, tokens: Tensor) -> Tensor:
    """Loss, backward, and all gradients in one vector."""
    model.zero_grad(set_to_none=True)
    step(tokens).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def train(model: nn.Module, step: Step, length: int, device: str, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[float] = []
    for index in range(steps):
        optimizer.zero_grad(set_to_none=True)
        loss = step(batch(8, length, device, index))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        if index % 10 == 0 or index == steps - 1:
            common.say(f"step {index:>3}: loss {losses[-1]:.4f}")
    return losses


def main(argv: Sequence[str] | None = None) -> int:
    args = common.arguments(__doc__, argv)
    layers, hidden, heads, head_dim, length, steps = (1, 32, 2, 16, 33, 40) if args.quick else (2, 64, 2, 32, 65, 100)
    torch.manual_seed(0)
    model = LanguageModel(layers, hidden, heads, head_dim, chunk=16).to(args.device)
    tokens = batch(8, length, args.device, seed=-1)
    common.say(f"{layers} KDA layers, {sum(p.numel() for p in model.parameters())} parameters, {length} tokens")

    expected, eager = common.contend("eager", lambda: gradients(model, model, tokens), args.device)
    fast = common.compiled(model, args)
    report, kda = common.contend_kda(lambda: gradients(model, fast, tokens), args.device, expected)
    results = [eager, kda]
    if args.quick:
        common.say("Inductor alone: left out by --quick")
    else:
        twin = copy.deepcopy(model)
        alone = torch.compile(twin, backend="inductor")
        common.say("Inductor alone compiles the unrolled loop, forward and backward")
        results.append(common.contend("inductor", lambda: gradients(twin, alone, tokens), args.device, expected)[1])

    losses = train(model, fast, length, args.device, steps)
    common.print_matches(report)
    print("\nforward and backward; the error is that of all gradients")
    common.print_table(results)
    problems: list[str] = []
    if [match.pattern for match in report.matches] != ["kda"] * layers:
        problems.append(f"{len(report.matches)} of {layers} layers matched")
    if kda.error is None or kda.error > 1e-4:
        problems.append(f"gradients differ from eager's by {kda.error}")
    if not losses[-1] < 0.95 * losses[0]:
        problems.append(f"the loss did not fall: {losses[0]:.3f} to {losses[-1]:.3f}")
    return common.verdict(problems)


if __name__ == "__main__":
    raise SystemExit(main())

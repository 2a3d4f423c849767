"""A Kimi Delta Attention layer written by hand in plain PyTorch, compiled with one argument.

    python examples/own_model.py [--quick] [--device cuda]

Nothing in the layer knows about kdacompile: projections, a short convolution, l2norm, the gate, a loop over chunks.
``torch.compile(layer, backend="kda")`` finds the recurrence in it, proves what it is, and runs it as one operator.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if __package__:
    from examples import _common as common
else:
    import _common as common


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)


def chunked_kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int) -> Tensor:
    """Kimi Delta Attention over chunks; q, k, g [B, T, H, K], v [B, T, H, V], beta [B, T, H]; g is the log gate."""
    batch, length, heads, k_dim = q.shape
    pad = -length % chunk
    q, k, v, g = (
        F.pad(x, (0, 0, 0, 0, 0, pad)).view(batch, -1, chunk, heads, x.shape[-1]).transpose(2, 3).float()
        for x in (q * k_dim**-0.5, k, v, g)
    )
    beta = F.pad(beta, (0, 0, 0, pad)).view(batch, -1, chunk, heads).transpose(2, 3).float().unsqueeze(-1)
    g = g.cumsum(dim=-2)
    future = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
    decay = (g.unsqueeze(-2) - g.unsqueeze(-3)).masked_fill(future.unsqueeze(-1), -torch.inf).exp()
    keys = (k.unsqueeze(-2) * k.unsqueeze(-3) * decay).sum(-1) * beta
    scores = (q.unsqueeze(-2) * k.unsqueeze(-3) * decay).sum(-1)
    values = torch.linalg.solve_triangular(keys.tril(-1), v * beta, upper=False, unitriangular=True)
    reads = torch.linalg.solve_triangular(keys.tril(-1), k * g.exp() * beta, upper=False, unitriangular=True)

    state = q.new_zeros(batch, heads, k_dim, v.shape[-1])
    out: list[Tensor] = []
    for n in range(q.shape[1]):
        new = values[:, n] - reads[:, n] @ state
        out.append((q[:, n] * g[:, n].exp()) @ state + scores[:, n] @ new)
        last = g[:, n, :, -1:]
        state = state * last.exp().transpose(-1, -2) + (k[:, n] * (last - g[:, n]).exp()).transpose(-1, -2) @ new
    return torch.stack(out, dim=1).transpose(2, 3).reshape(batch, -1, heads, v.shape[-1])[:, :length]


class KimiDeltaAttention(nn.Module):
    """One layer: ``heads`` heads of ``head_dim`` channels, a gate per channel, a short convolution before q, k, v."""

    def __init__(self, hidden: int, heads: int, head_dim: int, chunk: int = 64, conv: int = 4) -> None:
        super().__init__()
        self.heads, self.head_dim, self.chunk = heads, head_dim, chunk
        inner = heads * head_dim
        self.qkv = nn.Linear(hidden, 3 * inner, bias=False)
        self.conv = nn.Conv1d(3 * inner, 3 * inner, conv, groups=3 * inner, padding=conv - 1, bias=False)
        self.gate_down, self.gate_up = nn.Linear(hidden, head_dim, bias=False), nn.Linear(head_dim, inner, bias=False)
        self.beta = nn.Linear(hidden, heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(0.1, 4).log())
        self.dt_bias = nn.Parameter(torch.randn(heads, head_dim))
        self.output_gate = nn.Linear(hidden, inner, bias=False)
        self.norm = nn.RMSNorm(head_dim)
        self.out = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        by_head = (batch, length, self.heads, self.head_dim)
        mixed = F.silu(self.conv(self.qkv(x).transpose(1, 2))[..., :length]).transpose(1, 2)
        q, k, v = (part.view(by_head) for part in mixed.chunk(3, dim=-1))
        step = F.softplus(self.gate_up(self.gate_down(x)).view(by_head).float() + self.dt_bias)
        g = -self.A_log.float().exp().unsqueeze(-1) * step
        o = chunked_kda(l2norm(q), l2norm(k), v, g, self.beta(x).sigmoid(), self.chunk).to(x.dtype)
        o = self.norm(o) * self.output_gate(x).view(by_head).sigmoid()
        return self.out(o.flatten(2))


def main(argv: Sequence[str] | None = None) -> int:
    args = common.arguments(__doc__, argv)
    hidden, heads, head_dim, length, chunk = (64, 2, 32, 40, 16) if args.quick else (512, 4, 128, 256, 64)
    torch.manual_seed(0)
    layer = KimiDeltaAttention(hidden, heads, head_dim, chunk).to(args.device).eval()
    x = torch.randn(1, length, hidden, device=args.device)
    common.say(f"KDA layer: {heads} heads of {head_dim}, {length} tokens in chunks of {chunk}, on {args.device}")

    with torch.no_grad():
        expected, eager = common.contend("eager", lambda: layer(x), args.device)
        fast = common.compiled(layer, args)
        report, kda = common.contend_kda(lambda: fast(x), args.device, expected)
        results = [eager, kda]
        if args.quick:
            common.say("Inductor alone: left out by --quick")
        else:
            alone = torch.compile(layer, backend="inductor")
            common.say("Inductor alone compiles the unrolled chunks")
            results.append(common.contend("inductor", lambda: alone(x), args.device, expected)[1])

        common.print_matches(report)
        common.print_table(results)
    problems: list[str] = []
    if [match.pattern for match in report.matches] != ["kda"]:
        problems.append("the recurrence was not recognised as KDA")
    if kda.error is None or kda.error > 1e-5:
        problems.append(f"the output differs from eager's by {kda.error}")
    return common.verdict(problems)


if __name__ == "__main__":
    raise SystemExit(main())

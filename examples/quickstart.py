"""The gated delta rule as its equation reads, token by token, and what ``backend="kda"`` makes of it.

python examples/quickstart.py [--quick] [--device cuda]
kdacompile explain examples/quickstart.py:made
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

if __package__:
    from examples import _common as common
else:
    import _common as common


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """q, k [B, T, H, K], v [B, T, H, V], log gate g and beta [B, T, H]; arXiv 2412.06464, eq. 10."""
    B, T, H, K = q.shape
    state, out = q.new_zeros(B, H, K, v.shape[-1]), []
    for t in range(T):
        state = state * g[:, t, :, None, None].exp()
        new = (v[:, t] - (k[:, t, :, :, None] * state).sum(-2)) * beta[:, t, :, None]
        state = state + k[:, t, :, :, None] * new[:, :, None]
        out.append((q[:, t, :, :, None] * state).sum(-2))
    return torch.stack(out, dim=1)


def squashed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Nearly linear attention: the state goes through tanh, which no pattern has."""
    state, out = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[-1]), []
    for t in range(q.shape[1]):
        state = (state + k[:, t, :, :, None] * v[:, t, :, None]).tanh()
        out.append((q[:, t, :, :, None] * state).sum(-2))
    return torch.stack(out, dim=1)


def inputs(length: int, device: str = "cpu") -> tuple[Tensor, ...]:
    """Unit q, k and v, gates of exp(0) to exp(-1), beta in (0, 1)."""
    q, k, v = (F.normalize(torch.randn(2, length, 4, 32, device=device), dim=-1) for _ in range(3))
    return q, k, v, -torch.rand(2, length, 4, device=device), torch.rand(2, length, 4, device=device)


def both(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    return gated_delta_rule(q, k, v, g, beta) + squashed(q, k, v)


def made() -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """For ``kdacompile explain``: a match and a near miss."""
    return both, inputs(16)


def main(argv: Sequence[str] | None = None) -> int:
    args = common.arguments(__doc__, argv)
    torch.manual_seed(0)
    tensors = inputs(40 if args.quick else 256, args.device)
    expected, eager = common.contend("eager", lambda: gated_delta_rule(*tensors), args.device)
    fast = common.compiled(gated_delta_rule, args)
    report, kda = common.contend_kda(lambda: fast(*tensors), args.device, expected)
    common.print_matches(report)
    common.print_table([eager, kda])
    matched = [match.pattern for match in report.matches] == ["gated_delta_rule"]
    right = kda.error is not None and kda.error < 1e-5
    return common.verdict([] if matched and right else ["not matched, or not right"])


if __name__ == "__main__":
    raise SystemExit(main())

"""The adjoint of the chunked recurrence, and what a set of kernels for it is asked.

The forward pass of a chunk is that of ``linear_attention.py``. With R what a token's value differs by from what the
state before the chunk recalls, ``L[i,j] = sum_d k_id k_jd decay(i,j)`` (i > j), ``b`` = beta and
``P[i,j] = sum_d q_id k_jd decay(i,j)`` (i >= j) it reads::

    R  = V - K_g S          K_g = K exp G           X = (I + L diag(b))^-1 L
    Y  = R - X (b R)        Q_g = Q exp G           K_d = K exp(G_C - G)
    V' = b Y                O  = scale (Q_g S + P V')       S' = diag(exp G_C) S + K_d^T V'

Y is what a token's value differs by from what its own state recalls: ``Y = R - L (b Y)``, so ``Y = (I - X diag(b)) R``
and ``V' = (I - diag(b) X) (b R)``. X is strictly lower, and ``X[i,j]`` is what remains of key j when key i asks.

Three phases give its gradients, dS' being that of the state behind the chunk. *Prepare*, chunks in parallel: Q_g, K_g,
K_d, P, L, X. *Scan*, in which neither direction reads the other: S and Y as above, and in reverse::

    dV' = scale P^T dO + K_d dS'                    Z = dV' - X^T (b dV')
    dS  = diag(exp G_C) dS' + scale Q_g^T dO - K_g^T (b Z)

*Gradients*, chunks in parallel again::

    dV   = b Z              dbeta = rowsum(Z * Y)                   V' = b Y
    dQ_g = scale dO S^T     dP = scale tril(dO V'^T)                dE = rowsum(S * dS')
    dK_g = -b Z S^T         dL = -diag(b) tril(Z V'^T, -1)          dK_d = V' dS'^T
    dq_i = exp(G_i) dQ_g,i + sum_j dP[i,j] decay(i,j) k_j
    dk_i = exp(G_i) dK_g,i + exp(G_C - G_i) dK_d,i + sum_j dL[i,j] decay(i,j) k_j
           + sum_j decay(j,i) (dP[j,i] q_j + dL[j,i] k_j)

Nothing divides by beta, so that its gradient is there where it is 0. A log gate's gradient sums, over everything that
it decays, the value times its gradient::

    dg_t = exp(G_C) dE + sum_{i >= t} (Q_g dQ_g + K_g dK_g)_i + sum_{j < t} (K_d dK_d)_j
           + sum_{i >= t > j} decay(i,j) (dP[i,j] q_i k_j + dL[i,j] k_i k_j)

Only pairs of different tokens take part: the diagonal of P has no decay, and ``q dq - k dk`` over all of P would leave
the rounding of what cancels. Without the delta term Y is V, and neither R, L, X nor K_g exists.

``adjoint_program.py`` is the same as a tile program, with ``V' = T (b R)``, ``Z = T^T dV'``, ``T = I - diag(b) X`` and
``dbeta = rowsum(Z * R) - rowsum(L * Z V'^T)``; from it Ascend's kernels are emitted. Kernels for GPUs are
written by hand (``triton/backward_*.py``), and all are checked against autograd of the recurrence in float64.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from .calls import Call
from .scratch import Scratch

Gradients = tuple[Tensor | None, ...]


class GradientKernels(Protocol):
    """Kernels for the gradients of some calls. ``declines`` names what is in the way, or is None."""

    name: str

    def declines(self, call: Call) -> str | None: ...

    def gradients(
        self, call: Call, grad_o: Tensor | None, grad_state: Tensor | None, scratch: Scratch | None = None
    ) -> Gradients:
        """Those of ``call.tensors``, each in its tensor's dtype, contiguous and fresh; None for a tensor that is None.

        ``grad_o`` ``[B, T, HV, V]`` and ``grad_state`` ``[N, HV, K, V]`` are those of the results; None stands for
        zeros. T is not 0.
        """
        ...

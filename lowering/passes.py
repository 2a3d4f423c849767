"""A call in two passes: what its tokens do to a state that nobody knows yet, and then everything else.

A run of tokens that continues on another device, or in another block, maps the state affinely, ``S_out = A S_in + B``.
Its kernels make the same products of a chunk for A and B as for the outputs, so they prepare the chunks once and keep
what they made until the state that comes in is known. The backward goes the other way: first what the outputs ask of
the state that came in, ``dS_in = A^T dS_out + B'``, then all gradients.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from .adjoint import Gradients


class ForwardPasses(Protocol):
    """Both passes over one call without an initial state; each is asked for once.

    Its N rows are cut into ``parts`` of one length.
    """

    def maps(self, starts: Tensor, *, enters: bool = True, leaves: bool = True) -> tuple[Tensor, Tensor]:
        """A ``[parts, N, HV, K, K]``, or without the delta rule its diagonal ``[parts, N, HV, K, 1]``, and B
        ``[parts, N, HV, K, V]`` of each part, that of a row's first one from the states ``starts``; float32.

        Not ``enters``: nothing else comes into the rows, and A may be 0 if every B is the state behind its part. Not
        ``leaves``: nobody asks about the last part.
        """
        ...

    def outputs(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """o ``[B, T, HV, V]`` and the final states, from those before each part, ``[parts, N, HV, K, V]``."""
        ...


class BackwardPasses(Protocol):
    """Both passes over the adjoint of one call with an initial state; ``ready`` first, each once."""

    def ready(self) -> None:
        """Whatever needs no gradient of a state."""
        ...

    def asked(self, grad_state: Tensor) -> Tensor:
        """The gradient of the initial states, float32, where that of the final ones is ``grad_state``. May be left
        out.
        """
        ...

    def gradients(self, grad_state: Tensor) -> Gradients:
        """Every gradient, as of :class:`~.adjoint.GradientKernels`, for another ``grad_state``."""
        ...

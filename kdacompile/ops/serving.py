"""What a device's kernels have around them: those that fail are not asked again, calls like earlier ones launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from kdacompile.containment import contain
from kdacompile.lowering.recorded import Memory, Operands, Results
from kdacompile.lowering.scratch import Scratch

T = TypeVar("T")


class Named(Protocol):
    name: str


K = TypeVar("K", bound=Named)


class Serving:
    """``remember``: whether the kernels do everything through their scratch memory, so that calls like earlier ones
    only launch.
    """

    def __init__(self, *, remember: bool) -> None:
        self._memory = Memory() if remember else None
        self._failed: set[str] = set()
        """Kernels that met an error of ours: not asked again."""

    def launched(
        self,
        run: Callable[[Scratch, Operands, dict[str, Any]], Results],
        operands: Operands,
        options: dict[str, Any],
        *,
        multiplied: Sequence[Tensor] = (),
        written: int | None = None,
    ) -> Results:
        """``run``, or what it did for operands like these before.

        ``multiplied``: operands of matrix products, which round as the user asked torch for where they are fp32;
        ``written``: the operand that it writes into.
        """
        if self._memory is None:
            return run(Scratch(), operands, options)
        single = torch.float32 in {x.dtype for x in multiplied} if multiplied else False
        precision = torch.get_float32_matmul_precision() if single else None
        decides = (run.__name__, precision, *options.items())
        return self._memory.run(decides, operands, lambda scratch: run(scratch, operands, options), written)

    def chosen(self, choose: Callable[[], K | None], what: str = "") -> K | None:
        """What takes a call; None after an error of ours, too. ``what``: for ``attempted``."""
        found = contain("choosing a kernel", choose, lambda _: None)
        return None if found is None or what + found.name in self._failed else found

    def attempted(
        self, kernels: K | None, run: Callable[[K], T], scratch: Scratch | None = None, what: str = ""
    ) -> T | None:
        """What the kernels give; None without any and after an error of ours: nothing but fresh tensors has been
        written then. ``what`` they are asked for: those that fail at one thing may do at another.
        """
        if kernels is None:
            return None

        def fail(_: str) -> None:
            self._failed.add(what + kernels.name)
            if scratch is not None:
                scratch.once()

        return contain(f"running the {what}{kernels.name} kernels", lambda: run(kernels), fail)

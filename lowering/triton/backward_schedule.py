"""Block sizes of the kernels of the backward pass."""

from __future__ import annotations

from dataclasses import dataclass

from .configs import FEW_KEYS, MIN_CHUNK, padded


@dataclass(frozen=True)
class Schedule:
    """Block sizes, warps and stages of the three phases; ``keys`` are those of a block of K, ``columns`` those of V.

    ``key_warps`` and ``registers`` (0: as many as it takes): of the kernel that works on blocks of K.
    """

    chunk: int
    prepare_keys: int
    prepare_warps: int
    scan_columns: int
    scan_warps: int
    scan_stages: int
    keys: int
    columns: int
    warps: int
    state_warps: int
    key_warps: int
    registers: int

    @property
    def limits(self) -> dict[str, int]:
        """Of the kernel that works on blocks of K."""
        return {"maxnreg": self.registers} if self.registers else {}


def schedule(
    key_width: int, value_width: int, length: int, item: int, *, channels: bool, blocks: bool, chunk_size: int = 0
) -> Schedule:
    """The schedule of a shape; ``item``: bytes of an operand's element; ``channels``: a gate for each; ``blocks``: with
    decays by blocks of tokens."""
    keys, values = padded(key_width), padded(value_width)
    widest = 64 if item == 2 and FEW_KEYS <= key_width <= 128 else 32
    wish = min(chunk_size or widest, widest, max(length, 1))
    chunk = max(MIN_CHUNK, 1 << (wish - 1).bit_length())
    whole = keys == 128 and item == 2 and not channels  # eight warps hold all of K: 684 us in place of 870 for GDN
    narrow = 8 if blocks else 16  # of 8 channels a thread needs 128 registers, of 16 more than there are
    return Schedule(
        chunk=chunk,
        prepare_keys=min(keys, 16 if channels and item == 2 else 32),
        prepare_warps=4,
        scan_columns=min(values, 32),
        scan_warps=4,
        scan_stages=2 if keys <= 128 else 1,
        keys=narrow if channels else keys if whole else min(keys, 32),
        columns=min(values, 128 if item == 2 else 32),
        warps=4,
        state_warps=4,
        key_warps=8 if whole else 4,
        registers=128 if blocks else 0,
    )

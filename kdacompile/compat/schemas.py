"""What an operator declares, and how often a tensor was written to.

Torch has no public way to ask an ``OpOverload`` for its declaration or its overload's name, nor a tensor for its
version: ``_schema``, ``_overloadname`` and ``_version`` have been the same in torch 2.11 to 2.14, and long before.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor

OpOverload = torch._ops.OpOverload


def is_operator(target: Any) -> TypeGuard[torch._ops.OpOverload]:
    """True for one overload of an operator, such as ``aten.add.Tensor``."""
    return isinstance(target, OpOverload)


def declaration(op: Any) -> Any:
    """The declaration: ``name``, ``arguments``, ``returns``, ``is_mutable``."""
    return op._schema


def operator_name(op: Any) -> str:
    """``aten::add`` of ``aten.add.Tensor``."""
    return op._schema.name


def overload_name(op: Any) -> str:
    """``Tensor`` of ``aten.add.Tensor``."""
    return op._overloadname


def write_count(tensor: Tensor) -> int:
    """How often the tensor and its views were written to, in place."""
    return tensor._version

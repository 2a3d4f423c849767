"""What an operator declares.

Torch has no public way to ask an ``OpOverload`` for its declaration or its overload's name: ``_schema`` and
``_overloadname`` have been the same in torch 2.11 to 2.14, and long before.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch

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

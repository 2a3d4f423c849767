"""The catalogue of errors the semantic ops raise: one class per mistake, its message written once.

Every class is a :class:`kdacompile.errors.KdaError` and also the built-in exception a caller would expect
(``ValueError``, ``TypeError``, ...), so both ``except KdaError`` and ``except ValueError`` work. The facts of the
message stay readable in ``error.fields``.
"""

from __future__ import annotations

from typing import Any

from kdacompile.errors import KdaError


class OpError(KdaError):
    """Base of the errors of ``kdacompile.ops``: the arguments of a call do not describe something the op can run."""


class RankError(OpError, ValueError):
    """A tensor has the wrong number of dimensions."""

    template = "{name} must have {expected} dimensions {layout}, got shape {actual}"


class _Hinted(OpError):
    """An error that may say what the mistake looks like."""

    def __init__(self, *, hint: str = "", **fields: Any) -> None:
        super().__init__(hint=hint, **fields)


class SizeError(_Hinted, ValueError):
    """A tensor has the right rank, but a dimension disagrees with the other tensors."""

    template = "{name} must have shape {expected} ({layout}), got {actual}{hint}"


class HeadGroupError(_Hinted, ValueError):
    """The value heads cannot be divided evenly among the key heads."""

    template = "v has {value_heads} heads, which is not a positive multiple of the {heads} heads of q and k{hint}"


class OperandError(OpError, TypeError):
    """An operand that is not a tensor."""

    template = "{name} must be a tensor{optional}, got {kind}"


class DtypeError(OpError, TypeError):
    """A tensor has a dtype the op does not compute with."""

    template = "{name} must have dtype {expected}, got {actual}"


class DeviceError(OpError, ValueError):
    """The tensors of one call live on different devices."""

    template = "{name} is on {actual}, but q is on {expected}; move them to one device"


class GateError(OpError, ValueError):
    """The gate's kind, its function and the tensor ``g`` do not fit together."""

    template = "{problem}"


class GateParameterError(OpError, ValueError):
    """A parameter of the gate function (A_log, dt_bias, gate_scale) is missing, superfluous or has the wrong sign."""

    template = "gate_fn={gate_fn!r}: {problem}"


class CuSeqlensError(OpError, ValueError):
    """``cu_seqlens`` does not describe a packing of the sequence dimension."""

    template = "cu_seqlens {problem}"


class StepLengthError(OpError, ValueError):
    """The step op was given something other than exactly one token."""

    template = "a step takes exactly one token, got T = {length}; use linear_attention for longer sequences"


class StateError(OpError, ValueError):
    """The state cannot be read or written as asked."""

    template = "{problem}"


class StateIndicesError(OpError, ValueError):
    """The slots of a pool of states are not one for each request."""

    template = "state_indices {problem}"


class LatentWeightsError(OpError, ValueError):
    """The weights that expand a latent come in pairs, and the rotated parts of query and key too."""

    template = "{given} is given without {missing}: {reason}"


class PagedCacheError(OpError, ValueError):
    """A paged cache, its table or its lengths do not fit together, or cannot do what was asked of them."""

    template = "{problem}"


class OptionError(OpError, ValueError):
    """An option that is not a tensor has a value outside its range."""

    template = "{name} must be {expected}, got {actual!r}"


class VmapError(OpError, NotImplementedError):
    """``torch.vmap`` over a semantic op; the ops are batched already."""

    template = "{op} does not support torch.vmap: put the vmapped dimension into the batch dimension B of its inputs"


class DoubleBackwardError(OpError, NotImplementedError):
    """A second derivative was requested; the backward ops are not differentiable."""

    template = "{op} is not differentiable: second derivatives are not implemented"


class ForwardModeError(OpError, NotImplementedError):
    """A derivative along tangents was requested (``torch.func.jvp``, ``torch.autograd.forward_ad``)."""

    template = (
        "{op} has no forward-mode derivative: call the model without torch.compile for it, or take the compiled "
        "function's gradients (torch.autograd.grad)"
    )


class ContextParallelError(OpError, ValueError):
    """What a rank holds under context parallelism, or the way it is asked for, does not fit the other ranks."""

    template = "context parallel: {problem}"


class DistributedTensorError(OpError, NotImplementedError):
    """DTensor operands that are not sharded alike, by batch or by heads; the ops run on local shards."""

    template = (
        "{op} cannot run on these DTensors: {problem}. Shard every operand that has the batch, or every operand that "
        "has heads, evenly, and replicate the others; or call it on local shards (DTensor.to_local, or "
        "torch.distributed.tensor.experimental.local_map around the call)"
    )

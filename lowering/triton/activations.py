"""The functions that formulas of gates are written in, as Triton functions; of fp32 values."""

# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportUnknownArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAssignmentType=false

import triton
import triton.language as tl

from .decays import exp


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)); the root's inverse is one instruction, where a division takes care of ranges."""
    root = tl.rsqrt(1.0 + exp(-x))
    return root * root


@triton.jit
def softplus(x):
    """log(1 + exp x), linear where exp x would swallow the 1."""
    return tl.where(x > 20.0, x, tl.log(1.0 + exp(tl.minimum(x, 20.0))))


@triton.jit
def logsigmoid(x):
    return tl.minimum(x, 0.0) - tl.log(1.0 + exp(-tl.abs(x)))


@triton.jit
def log(x):
    return tl.log(x)

"""The globals of every replacement: Dynamo looks names up here when it inlines one."""

import operator

import torch

from kdacompile import ops
from kdacompile.capture import ssd

__all__ = ["operator", "ops", "ssd", "torch"]

"""The globals of every replacement: Dynamo looks names up here when it inlines one."""

import operator

import torch

__all__ = ["operator", "torch"]

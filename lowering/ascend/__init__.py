"""Ascend: plans as Triton kernels for triton-ascend, and the means to run them."""

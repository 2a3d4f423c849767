"""The full table: every model, length and dtype, prefill and cached step. ``python -m tests.matrix --help``."""

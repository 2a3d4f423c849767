"""``python -m kdacompile bench``: ours beside Inductor alone and eager, measured side by side.

``suites`` says what is measured, ``harness`` runs every contender in a process of its own with empty caches,
``worker`` is that process, ``measure`` has its clocks and scales, ``table`` the output. ``cuda`` is the CUDA suite,
which measures on the device; ``cuda_worker`` is one of its contenders.
"""

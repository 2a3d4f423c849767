"""``python -m kdacompile bench``: ours beside Inductor alone and eager, measured side by side.

``suites`` says what is measured on a CPU, ``harness`` runs every contender in a process of its own with empty caches,
``worker`` is that process, ``measure`` has its clocks and scales, ``table`` the output. ``cuda``, ``cuda_grid``,
``train``, ``mla`` and ``parallel`` are suites of CUDA devices: ``rows`` has their operands, contenders and expected
results, ``cuda_models`` whole models, ``device_clock`` their clocks. ``relay`` starts processes and ``record`` writes
what was measured, for all suites.
"""

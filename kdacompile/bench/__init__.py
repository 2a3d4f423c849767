"""``python -m kdacompile bench``: ours beside Inductor alone and eager, measured side by side.

``suites`` says what is measured, ``harness`` runs every contender in a process of its own with empty caches,
``worker`` is that process, ``measure`` has its clocks and scales, ``table`` the output. ``cuda`` is the CUDA suite,
which measures on the device: ``cuda_cases`` says what, ``relay`` runs the processes, ``cuda_worker`` is one of them,
with ``cuda_ops`` or ``cuda_models``, ``device_clock`` its clocks, ``cuda_table`` the output. ``mla`` measures latent
attention on the device.
"""

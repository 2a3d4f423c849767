"""Subcommands of ``kdacompile`` that are more than a function call: each module is one, with a ``main``."""

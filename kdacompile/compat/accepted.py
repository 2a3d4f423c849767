"""Says when this torch is none of those tested. Imported first, before a private name of torch is missed."""

from __future__ import annotations

import warnings

from kdacompile import doctor


def warn() -> None:
    """Once a process: the module is imported at the first compilation."""
    found = doctor.check_torch()
    if found.status == "broken":
        warnings.warn(f"kdacompile: torch {found.detail}; {found.hint}", RuntimeWarning, stacklevel=2)


warn()

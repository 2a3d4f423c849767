"""``python -m kdacompile doctor``: what ``kdacompile.doctor`` finds, for a person or a program."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TextIO

from kdacompile import doctor
from kdacompile.commands import console


def main(out: TextIO | None = None, *, as_json: bool = False) -> int:
    """Print every finding; exit status 1 where the backend cannot work."""
    findings = [check() for check in doctor.CHECKS]
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2), file=out or sys.stdout)
    elif out is not None:
        print(*findings, sep="\n", file=out)
    else:
        console.show_checks(findings)
    return 1 if any(finding.status == "broken" for finding in findings) else 0

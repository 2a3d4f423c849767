"""A worker for the relay's test: groups are "READY_SECONDS STATUS OUT"."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from kdacompile.bench.relay import Steps


def measured(group: str, contender: str) -> Steps:
    ready_seconds, status, out = group.split()
    if int(status):
        print("broken on purpose", file=sys.stderr)
        raise SystemExit(int(status))
    time.sleep(float(ready_seconds))
    yield None
    start = time.monotonic()
    time.sleep(0.1)
    with Path(out).open("a") as file:
        file.write(f"{start} {time.monotonic()} {os.environ['TRITON_CACHE_DIR']}\n")
    yield contender, {"hidden": "fla" in sys.modules}
    if contender == "endless":
        Path(out).with_suffix(".found").touch()  # the relay asks for more when it has written what it got
        time.sleep(60.0)

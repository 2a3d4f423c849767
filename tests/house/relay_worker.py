"""A worker for the relay's test: ``-m tests.house.relay_worker READY_SECONDS STATUS OUT``."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from kdacompile.bench.relay import wait_for_turn


def main(ready_seconds: str, status: str, out: str) -> int:
    if int(status):
        print("broken on purpose", file=sys.stderr)
        return int(status)
    time.sleep(float(ready_seconds))
    wait_for_turn()
    start = time.monotonic()
    time.sleep(0.1)
    with Path(out).open("a") as file:
        file.write(f"{start} {time.monotonic()} {os.environ['TRITON_CACHE_DIR']}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

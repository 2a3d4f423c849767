"""Measures the cells given as JSON, in this process: ``python -m tests.matrix.worker RECORD CELLS``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.matrix.cells import Cell, measure
from tests.matrix.record import Record, line


def main(path: str, cells: str) -> None:
    record = Record(Path(path))
    for fields in json.loads(cells):
        cell = Cell(**fields)
        record.start(cell)
        row = measure(cell)
        record.add(row)
        print(line(row), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

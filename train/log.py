"""A log of JSON lines, one record a line, flushed at once; a resumed run cuts it back to its checkpoint first."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from train.errors import UserError


class Log:
    """Appends records to a file. Use as a context manager.

    Args:
      path: of the file.
      fixed: fields that every record gets, such as the norm.
      resume_step: None to begin an empty file; otherwise records of later steps, and a line cut short by the end of an
        earlier process, are dropped.
    """

    def __init__(self, path: Path, *, fixed: Mapping[str, Any] | None = None, resume_step: int | None = None):
        self.fixed = dict(fixed or {})
        kept = [] if resume_step is None else [r for r in read(path) if r.get("step", 0) <= resume_step]
        write_atomically(path, "".join(json.dumps(record) + "\n" for record in kept))
        self._file = path.open("a", encoding="utf-8")

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def write(self, event: str, **values: Any) -> None:
        """Add a record."""
        record = {"event": event, **self.fixed, **values}
        self._file.write(json.dumps({name: _finite(value) for name, value in record.items()}) + "\n")
        self._file.flush()


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a log; a last line without its end is left out, and so is a file that is not there.

    Raises:
      UserError: naming the line that is not JSON.
    """
    if not path.exists():
        return []
    whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    records = []
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise UserError(f"{path}: line {number} is not JSON: {error}.") from error
    return records


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: a loss that has diverged becomes null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old text or the new, never a part."""
    beside = path.with_name(path.name + ".part")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)

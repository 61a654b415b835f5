"""Execute the notebooks in order; with --write keep what they show, without it only check that they run.

usage: python tools/run_notebooks.py [--write] [NAME ...]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).resolve().parents[1]


def execute(path: Path) -> nbformat.NotebookNode:
    """The notebook at `path`, executed in the repository's root as its readers would."""
    book = nbformat.read(path, as_version=4)
    for cell in book.cells:
        cell.metadata.pop("execution", None)
    NotebookClient(
        book, timeout=900, kernel_name="python3", record_timing=False, resources={"metadata": {"path": ROOT}}
    ).execute()
    book.metadata.pop("widgets", None)
    return book


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="store the outputs")
    parser.add_argument("names", nargs="*", help="notebooks to run; all where none is named")
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    paths = [ROOT / "notebooks" / f"{name.removesuffix('.ipynb')}.ipynb" for name in options.names]
    failed = 0
    for path in paths or sorted((ROOT / "notebooks").glob("*.ipynb")):
        start = time.monotonic()
        try:
            book = execute(path)
        except CellExecutionError as error:
            failed += 1
            print(f"{path.name}: failed\n{error}", file=sys.stderr)
            continue
        print(f"{path.name}: ran in {time.monotonic() - start:.0f} s")
        if options.write:
            nbformat.write(book, path)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Command line: `python -m benchmarks.claims [--write | --check] [--list] [id …]`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from benchmarks.claims import CLAIMS
from benchmarks.claims.page import PATH, page, verdicts_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Run claims and print each with its figures and verdict; with --write, all of them into docs/claims.md."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.claims", description=main.__doc__)
    parser.add_argument("id", nargs="*", help="claims to run; all by default")
    parser.add_argument("--write", action="store_true", help=f"run all and write {PATH.name}")
    parser.add_argument("--check", action="store_true", help=f"fail where a verdict is not that of {PATH.name}")
    parser.add_argument("--list", action="store_true", help="list the claims and run none")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.id) - set(CLAIMS)):
        parser.error(f"`id` {unknown[0]!r} is no claim; the claims are {', '.join(CLAIMS)}")
    if options.write and options.id:
        parser.error("`--write` writes the whole page: give it without claims")
    outcomes = {}
    for id in options.id or CLAIMS:
        claim = CLAIMS[id]
        print(f"{id}: {claim.words}  [{claim.basis}]")
        if options.list:
            continue
        started = time.perf_counter()
        outcomes[id] = outcome = claim.run()
        print(f"  {outcome.verdict} after {time.perf_counter() - started:.1f} s. {outcome.ran} {outcome.note}")
        for figure in outcome.figures:
            print(f"    {figure}")
        sys.stdout.flush()
    if options.write:
        PATH.write_text(page(outcomes), encoding="utf-8")
        print(f"written to {PATH}")
    if options.check:
        written = verdicts_of(PATH.read_text(encoding="utf-8"))
        other = {id: outcome.verdict for id, outcome in outcomes.items() if outcome.verdict != written.get(id)}
        for id, verdict in other.items():
            print(f"{id}: {verdict} here, {written.get(id, 'missing')} in {PATH.name}")
        print(f"{len(outcomes) - len(other)} of {len(outcomes)} verdicts as written")
        return int(bool(other))
    return 0


if __name__ == "__main__":
    sys.exit(main())

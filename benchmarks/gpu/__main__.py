"""The tile kernels on a GPU: are they right, and how fast beside XLA and a copy of the same bytes.

First every kernel against float64 NumPy, then the large ones in turns with XLA's version and a device copy: medians of
rounds, so that all three see the same clock and the same neighbours. Ends within the time given (five minutes), and
says what it did not reach. A TPU works too.

usage: python -m benchmarks.gpu [--seconds 300] [--json FILE] [--tune | --peers]
       python -m benchmarks.gpu --dry-run      tiny shapes, interpreted on CPU: checks the script, measures nothing
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.cases import Case, cases, large_cases
from benchmarks.gpu import peers, tuning
from benchmarks.gpu.correctness import correctness, spread
from benchmarks.gpu.speed import HEADER, line, speed
from normlib.kernels.machine import MACHINES, Machine


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--tune", action="store_true", help="time tilings of the large kernels instead")
    parser.add_argument("--peers", action="store_true", help="time whole norms against Flax and PyTorch instead")
    args = parser.parse_args(argv)
    platform = jax.default_backend()
    if not args.dry_run and platform not in ("gpu", "tpu"):
        raise SystemExit(f"no GPU here (JAX runs on {platform}); --dry-run checks the script on CPU")
    machine = MACHINES["gpu"].replace(interpret=True) if args.dry_run else MACHINES[platform]
    device = jax.devices()[0].device_kind
    print(f"{device}, jax {jax.__version__}{', dry run' if args.dry_run else ''}", flush=True)
    until = time.perf_counter() + args.seconds
    run = tuning.run if args.tune else peers.run if args.peers else _kernels
    report = {"device": device, "jax": jax.__version__, "dry_run": args.dry_run, **run(machine, args.dry_run, until)}
    report["seconds"] = time.perf_counter() - until + args.seconds
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))
    return report


def _kernels(machine: Machine, dry: bool, until: float) -> dict[str, Any]:
    small, large = list(spread(list(cases()))), list(large_cases())
    tall = list(large_cases(fewer=64))  # the same lengths, few rows: what the timed kernels give
    options: dict[str, Any] = {}
    if machine.name == "tpu":
        small = [c for c in small if all(d != jnp.float16 for _, d in c.shapes)]
    if dry:
        small, large, tall = small[::101], list(large_cases(fewer=8192, shorter=64))[::5], []
        options = {"rounds": 1, "least": 0.0}
    begin = time.perf_counter()
    checked = correctness(machine, [*tall, *small], begin + (until - begin) * 0.55)
    right = sum(row["ok"] for row in checked)
    missing = [c.name for c in [*tall, *small][len(checked) :]]
    print(f"{right} of {len(checked)} kernels right; {len(missing)} not reached in time; "
          f"{time.perf_counter() - begin:.0f} s")  # fmt: skip
    print(HEADER)
    timed: list[dict[str, Any]] = []
    for case in large:
        if time.perf_counter() > until:
            break
        timed.append(speed(machine, case, **options))
        print(line(timed[-1]), flush=True)
    if timed:
        print(f"geometric mean XLA/kernel {np.exp(np.mean([np.log(r['xla_over_kernel']) for r in timed])):.2f}")
    missing += [_name(case) for case in large[len(timed) :]]
    return {"correctness": checked, "speed": timed, "not_reached": missing}


def _name(case: Case) -> str:
    return f"time of {case.name}"


if __name__ == "__main__":
    found = main()
    raise SystemExit(0 if all(row["ok"] for row in found.get("correctness", ())) else 1)

"""Compile every kernel for a TPU that is not there, and print what fits and what does not.

Lowering proves that Pallas has a rule for everything in a kernel. The compiler is stricter: it lays values out in
registers and finds that tiles do not fit VMEM. It needs libtpu, which is best kept in an environment of its own: beside
JAX it prints errors into every run on CPU. `make compile-tpu` makes one.

usage: python tools/compile_tpu.py [--topology v5e:2x2] [--every N] [--json FILE]
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--topology", default="v5e:2x2")
    parser.add_argument("--every", type=int, default=1, help="take every so manyth case")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    from benchmarks.cases import cases, large_cases
    from normlib.kernels.machine import MACHINES

    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=args.topology).devices
    except (RuntimeError, NotImplementedError) as error:
        print(f"no TPU compiler here (is libtpu installed?): {error}", file=sys.stderr)
        return 3
    place = SingleDeviceSharding(devices[0])
    # Mosaic does not load float16 (the pass leaves such arrays to XLA there)
    small = [case for case in cases() if all(dtype != jnp.float16 for _, dtype in case.shapes)]
    chosen = [*small[:: args.every], *large_cases()]
    rows, failed = [], 0
    print(f"{'kernel':48} {'result':8} {'s':>5}  jax {jax.__version__}, {devices[0].device_kind}, {args.topology}")
    for case in chosen:
        structs = [jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=place) for t in case.structs()]
        begin, reason = time.perf_counter(), ""
        try:
            jax.jit(functools.partial(case.call, MACHINES["tpu"])).lower(*structs).compile()
        except Exception as error:  # Mosaic's own error is a plain Exception of a private module
            if not isinstance(error, RuntimeError | ValueError | NotImplementedError) and "osaic" not in str(error):
                raise
            reason = " ".join(str(error).split())[:300]
            failed += 1
        took = time.perf_counter() - begin
        rows.append({"kernel": case.name, "ok": not reason, "seconds": round(took, 2), "reason": reason})
        print(f"{case.name:48} {'FAILED' if reason else 'compiled':8} {took:5.1f}  {reason}", flush=True)
    print(f"{len(rows) - failed} of {len(rows)} compiled")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())

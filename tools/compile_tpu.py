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
    programs = [(case.name, functools.partial(case.call, MACHINES["tpu"]), case.structs()) for case in chosen]
    programs = [(name, call, [_placed(t, place) for t in given]) for name, call, given in programs]
    programs += list(split(devices))
    rows, failed = [], 0
    print(f"{'kernel':48} {'result':8} {'s':>5}  jax {jax.__version__}, {devices[0].device_kind}, {args.topology}")
    for name, call, given in programs:
        begin, reason = time.perf_counter(), ""
        try:
            jax.jit(call).lower(*given).compile()
        except Exception as error:  # Mosaic's own error is a plain Exception of a private module
            if not isinstance(error, RuntimeError | ValueError | NotImplementedError) and "osaic" not in str(error):
                raise
            reason = " ".join(str(error).split())[:300]
            failed += 1
        took = time.perf_counter() - begin
        rows.append({"kernel": name, "ok": not reason, "seconds": round(took, 2), "reason": reason})
        print(f"{name:48} {'FAILED' if reason else 'compiled':8} {took:5.1f}  {reason}", flush=True)
    print(f"{len(rows) - failed} of {len(rows)} compiled")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    return 1 if failed else 0


def _placed(t, place):
    import jax

    return jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=place)


def split(devices):
    """(name, call, operands) of operators inside shard_map over all devices: forward and backward.

    Not under jit with sharded arrays: a topology without its client has no partitioner for custom calls.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    import normlib as nl

    mesh = Mesh(np.array(devices), ("d",))
    x = jax.ShapeDtypeStruct((64, 32, 1024), jnp.bfloat16, sharding=NamedSharding(mesh, P("d")))
    scale = jax.ShapeDtypeStruct((1024,), jnp.float32, sharding=NamedSharding(mesh, P()))
    synced = lambda *a: nl.batch_norm(*a, axis_name="d").y  # noqa: E731
    for name, norm in (("layer_norm", nl.layer_norm), ("rms_norm", nl.rms_norm), ("batch_norm", synced)):

        def call(x, scale, dy, norm=norm):
            y, vjp = jax.vjp(norm, x, scale)
            return y, *vjp(dy)

        def local(*args, call=call):
            with nl.use_backend("pallas", platform="tpu", interpret=False):
                return call(*args)

        whole = jax.shard_map(local, mesh=mesh, in_specs=(P("d"), P(), P("d")), out_specs=(P("d"), P("d"), P()))
        yield f"{name} inside shard_map on {len(devices)}", whole, [x, scale, x]


if __name__ == "__main__":
    raise SystemExit(main())

"""Compile every kernel for a TPU or GPU that is not there, and print what fits and what does not.

Lowering proves that Pallas has a rule for everything in a kernel. The compilers are stricter: Mosaic lays values out in
registers and finds that tiles do not fit VMEM, Triton and ptxas make a program of registers and shared memory. They
need libtpu, or JAX's CUDA plugin and ptxas, which are best kept in an environment of their own: beside JAX they print
errors into every run on CPU. `make compile-tpu` and `make compile-gpu` make one.

usage: python tools/compile_ahead.py tpu|gpu [--topology v5e:2x2] [--every N] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# What the compiler asks of a GPU, of NVIDIA's published figures of the H200 (compute capability 9.0)
H200 = """
gpu_device_info {
  name: "NVIDIA H200" device_vendor: "NVIDIA Corporation" cuda_compute_capability { major: 9 }
  core_count: 132 clock_rate_ghz: 1.98 fpus_per_core: 128 threads_per_warp: 32 threads_per_core_limit: 2048
  threads_per_block_limit: 1024 thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_core: 233472 shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  l2_cache_size: 52428800 memory_bandwidth: 4800000000000 device_memory_size: 150000000000 device_address_bits: 64
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.12.0"
}
platform_name: "CUDA" device_description_str: "NVIDIA H200" dnn_version_info { major: 9 minor: 12 }
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("platform", choices=("tpu", "gpu"))
    parser.add_argument("--topology", default="v5e:2x2", help="of TPUs")
    parser.add_argument("--every", type=int, default=1, help="take every so manyth case")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    import jax
    import jax.numpy as jnp
    from jax.sharding import SingleDeviceSharding

    from benchmarks.cases import cases, large_cases
    from normlib.kernels.machine import MACHINES

    try:
        devices = topology(args.platform, args.topology)
    except (RuntimeError, NotImplementedError) as error:
        print(f"no compiler for a {args.platform} here (is it installed?): {error}", file=sys.stderr)
        return 3
    place = SingleDeviceSharding(devices[0])
    small = list(cases())
    if args.platform == "tpu":  # Mosaic does not load float16 (the pass leaves such arrays to XLA there)
        small = [case for case in small if all(dtype != jnp.float16 for _, dtype in case.shapes)]
    chosen = [*small[:: args.every], *large_cases()]
    programs = [(case.name, functools.partial(case.call, MACHINES[args.platform]), case.structs()) for case in chosen]
    programs = [(name, call, [_placed(t, place) for t in given]) for name, call, given in programs]
    programs += list(split(devices)) if args.platform == "tpu" else []
    rows, failed = [], 0
    print(f"{'kernel':48} {'result':8} {'s':>5}  jax {jax.__version__}, {devices[0].device_kind}")
    for name, call, given in programs:
        begin, reason = time.perf_counter(), ""
        try:
            with described(args.platform):
                lowered = jax.jit(call).lower(*given)
            lowered.compile()
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


def topology(platform: str, name: str):
    """Devices that can only be compiled for."""
    from jax.experimental import topologies

    if platform == "tpu":
        return topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    return topologies.get_topology_desc("h200", "cuda", topology="1x1x1", target_config=H200).devices


def described(platform: str):
    """Where lowering asks which GPU there is: one of its own."""
    from jax.sharding import AbstractMesh, use_abstract_mesh

    from sim_npu.lowering import GPU

    if platform == "tpu":
        return contextlib.nullcontext()
    return use_abstract_mesh(AbstractMesh((1,), ("device",), abstract_device=GPU))


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

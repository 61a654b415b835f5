"""Files other tools read: CSV in the profiler's op_summary columns, and a trace in the Chrome trace-event format."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

from sim_npu.ir import BlockUse
from sim_npu.result import KernelResult, SimReport

# Columns of msprof's op_summary, in its order; what a model cannot know stays empty.
OP_SUMMARY = tuple(
    """Device_id; Model ID; Task ID; Stream ID; Op Name; OP Type; OP State; Task Type; Task Start Time(us);
    Task Duration(us); Task Wait Time(us); Block Dim; Mix Block Dim; HF32 Eligible; Input Shapes; Input Data Types;
    Input Formats; Output Shapes; Output Data Types; Output Formats; Context ID; aicore_time(us); aic_total_cycles;
    aic_mac_time(us); aic_mac_ratio; aic_scalar_time(us); aic_scalar_ratio; aic_mte1_time(us); aic_mte1_ratio;
    aic_mte2_time(us); aic_mte2_ratio; aic_fixpipe_time(us); aic_fixpipe_ratio; aic_icache_miss_rate; aiv_time(us);
    aiv_total_cycles; aiv_vec_time(us); aiv_vec_ratio; aiv_scalar_time(us); aiv_scalar_ratio; aiv_mte2_time(us);
    aiv_mte2_ratio; aiv_mte3_time(us); aiv_mte3_ratio; aiv_icache_miss_rate; cube_utilization(%)""".replace("\n", "")
    .replace("    ", "")
    .replace("; ", ";")
    .split(";")
)
_DTYPES = {"float32": "FLOAT", "float16": "FLOAT16", "bfloat16": "DT_BF16", "int32": "INT32", "int8": "INT8"}


def op_summary_csv(report: SimReport) -> str:
    """One row per kernel in op_summary's columns; times in µs, cycles summed over cores.

    >>> from sim_npu import demos, simulate
    >>> text = op_summary_csv(simulate(demos.channel_stats, ((4096, 256), "float32")))
    >>> [line.split(",")[4] for line in text.splitlines()]
    ['Op Name', 'channel_partials', 'channel_merge']
    """
    out = io.StringIO()
    writer = csv.DictWriter(out, OP_SUMMARY, restval="", lineterminator="\n")
    writer.writeheader()
    start = 0.0
    for i, k in enumerate(report.kernels):
        writer.writerow(_row(report, k, i, start))
        start += k.total_us
    return out.getvalue()


def _row(report: SimReport, k: KernelResult, task: int, start: float) -> dict[str, Any]:
    inputs = [b for b in k.program.blocks if b.role == "in"]
    outputs = [b for b in k.program.blocks if b.role == "out"]
    scalar = k.timeline.steps * report.chip.us(report.chip.scalar_step) + report.chip.setup_us
    return {
        "Device_id": 0,
        "Task ID": task,
        "Stream ID": 0,
        "Op Name": k.name,
        "OP Type": k.name,
        "OP State": "simulated",
        "Task Type": "AI_VECTOR_CORE",
        "Task Start Time(us)": f"{start:.3f}",
        "Task Duration(us)": f"{k.total_us:.3f}",
        "Task Wait Time(us)": "0",
        "Block Dim": k.schedule.cores,
        "Mix Block Dim": 0,
        "HF32 Eligible": "NO",
        "Input Shapes": _shapes(inputs),
        "Input Data Types": _types(inputs),
        "Input Formats": ";".join("ND" for _ in inputs),
        "Output Shapes": _shapes(outputs),
        "Output Data Types": _types(outputs),
        "Output Formats": ";".join("ND" for _ in outputs),
        "aiv_time(us)": f"{k.core_us:.3f}",
        "aiv_total_cycles": round(k.core_us * report.chip.clock_mhz * k.schedule.cores),
        "aiv_vec_time(us)": f"{k.busy_us['V']:.3f}",
        "aiv_vec_ratio": f"{k.ratio('V'):.4f}",
        "aiv_scalar_time(us)": f"{min(scalar, k.core_us):.3f}",
        "aiv_scalar_ratio": f"{min(1.0, scalar / k.core_us) if k.core_us else 0.0:.4f}",
        "aiv_mte2_time(us)": f"{k.busy_us['MTE2']:.3f}",
        "aiv_mte2_ratio": f"{k.ratio('MTE2'):.4f}",
        "aiv_mte3_time(us)": f"{k.busy_us['MTE3']:.3f}",
        "aiv_mte3_ratio": f"{k.ratio('MTE3'):.4f}",
    }


def _shapes(blocks: list[BlockUse]) -> str:
    return ";".join(",".join(map(str, b.array_shape)) for b in blocks)


def _types(blocks: list[BlockUse]) -> str:
    return ";".join(_DTYPES.get(b.dtype, b.dtype.upper()) for b in blocks)


THREADS = {"S": 0, "MTE2": 1, "V": 2, "MTE3": 3}


def trace_events(report: SimReport) -> dict[str, Any]:
    """The busiest core's first intervals as trace events: process = core, threads = units, times in µs.

    All cores with the same number of steps look alike, so one is written; kernels follow one another.
    """
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": f"{report.chip.name} core 0 (model)"}},
    ]
    for unit, tid in THREADS.items():
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": {"name": unit}})
        events.append({"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": tid, "args": {"sort_index": tid}})
    start = 0.0
    for k in report.kernels:
        events.append(_complete(k.name, "kernel", start, k.total_us, 4, {"cores": k.schedule.cores}))
        begin = start + k.launch_us
        for i in k.timeline.intervals:
            ts, dur = report.chip.us(i.start), report.chip.us(i.end - i.start)
            events.append(_complete(i.name, i.unit, begin + ts, dur, THREADS[i.unit], {"step": i.step}))
        start += k.total_us
    events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": 4, "args": {"name": "kernels"}})
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {"source": "sim_npu, a model", "chip": report.chip.name, "plan": report.plan.describe()},
    }


def _complete(name: str, category: str, ts: float, dur: float, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "ts": round(ts, 4),
        "dur": round(dur, 4),
        "pid": 0,
        "tid": tid,
        "args": args,
    }


def trace_json(report: SimReport) -> str:
    """`trace_events` as text; opens in Perfetto and chrome://tracing."""
    return json.dumps(trace_events(report), indent=1)

"""Command line: `python -m sim_npu report|plans|validate|trace`.

    python -m sim_npu report sim_npu.demos:rms_norm --shape 4096x4096 --dtype bf16 --chip 910b2
    python -m sim_npu plans sim_npu.demos:rms_norm --shape 4096x4096 --dtype bf16
    python -m sim_npu trace sim_npu.demos:rms_norm --shape 4096x4096 -o trace.json
    python -m sim_npu validate

The kernel is `module:function`. With one `--shape`, a function that has `example_arrays(shape, dtype)` makes its own
arguments; otherwise give one `--shape` (and `--dtype`) per argument. `--set groups=8` passes keywords.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from sim_npu.chips import CHIPS, get_chip
from sim_npu.export import op_summary_csv, trace_json
from sim_npu.hints import hints
from sim_npu.html import html_page
from sim_npu.memory import CACHES
from sim_npu.pallas_adapter import UnsupportedKernel
from sim_npu.plan import RESIDENCY, TilePlan
from sim_npu.report import hint_lines
from sim_npu.search import rank_plans
from sim_npu.simulate import simulate

DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
    "fp32": "float32",
    "f32": "float32",
}


RESERVED = ("chip", "plan", "plans", "profile", "cache", "report", "explain_capacity")


def load(name: str) -> Callable:
    """The function `module:function`.

    Raises:
      ValueError: if the text has another form or there is no such function.
    """
    module, colon, attribute = name.partition(":")
    if not colon or not module:
        raise ValueError(f"`kernel` must be module:function, such as sim_npu.demos:rms_norm; got {name!r}.")
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(f"`kernel` {name!r}: {error}.") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ValueError(f"`kernel` {name!r}: {module} has no {attribute!r}.")
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"`kernel` {name!r} must be a function; it is a {type(found).__name__}.")
    return found


def parse_shape(text: str) -> tuple[int, ...]:
    """`4096x4096` as a tuple.

    >>> parse_shape("8x32x64")
    (8, 32, 64)

    Raises:
      ValueError: for anything but sizes joined by x.
    """
    try:
        shape = tuple(int(n) for n in text.lower().split("x"))
    except ValueError:
        shape = ()
    if not shape or any(n < 1 for n in shape):
        raise ValueError(f"`--shape` must be sizes joined by x, such as 4096x1024; got {text!r}.")
    return shape


def parse_dtype(text: str) -> str:
    """A dtype's full name; bf16, fp16 and fp32 are short for theirs.

    Raises:
      ValueError: for a name JAX does not know.
    """
    try:
        return jnp.dtype(DTYPES.get(text, text)).name
    except TypeError as error:
        raise ValueError(f"`--dtype` must be a dtype such as bf16, float16 or float32; got {text!r}.") from error


def chip_name(text: str) -> str:
    """A chip's preset name, from any case or another of its names."""
    try:
        return get_chip(text).name
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def arguments(fn: Callable, shapes: Sequence[str], dtypes: Sequence[str]) -> tuple:
    """Arguments of `fn` from the command line's shapes and dtypes."""
    parsed = [parse_shape(s) for s in shapes]
    names = [parse_dtype(d) for d in dtypes] or ["float32"]
    if len(names) not in (1, len(parsed)):
        raise ValueError(f"`--dtype` must be given once or once per `--shape` ({len(parsed)}); got {len(names)}.")
    names = names * len(parsed) if len(names) == 1 else names
    make = getattr(fn, "example_arrays", None)
    if len(parsed) == 1 and make is not None:
        return tuple(make(parsed[0], jnp.dtype(names[0])))
    return tuple(zip(parsed, names))


def keywords(pairs: Sequence[str]) -> dict[str, Any]:
    """`name=value` pairs; values are Python literals, or text."""
    out = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"`--set` must be name=value; got {pair!r}.")
        if name in RESERVED:
            raise ValueError(f"`--set` gives keywords of the kernel; {name!r} has options of its own (see --help).")
        try:
            out[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            out[name] = value
    return out


def parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    top = argparse.ArgumentParser(prog="python -m sim_npu", description="A model of an Ascend AI Core.")
    commands = top.add_subparsers(dest="command", required=True)
    about = {
        "report": "time, traffic, buffer and hints of a kernel",
        "plans": "tilings of a kernel, fastest first",
        "trace": "timeline as trace-event JSON, for Perfetto",
    }
    for name, text in about.items():
        p = commands.add_parser(name, help=text, description=text)
        p.add_argument("kernel", help="module:function")
        p.add_argument("--shape", action="append", required=True, help="sizes joined by x; once per argument")
        p.add_argument("--dtype", action="append", default=[], help="bf16, fp16, fp32, int8, ... (default fp32)")
        p.add_argument("--chip", default="910b2", type=chip_name, help=f"{', '.join(sorted(CHIPS))} (default 910b2)")
        p.add_argument("--cache", default="warm", choices=CACHES, help="state of L2 (default warm)")
        p.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="keyword of the kernel")
        if name != "plans":
            p.add_argument("--profile", default="ideal", help="ideal, as_shipped or as_shipped:operator")
            p.add_argument("--rows", type=int, help="rows per block")
            p.add_argument("--chunk", type=int, help="elements of a row at a time")
            p.add_argument("--residency", choices=RESIDENCY, help="keep whole rows, or stream them")
            p.add_argument("--depth", type=int, default=2, help="queue depth (default 2)")
            p.add_argument("--cores", type=int, help="at most so many cores")
    commands.choices["report"].add_argument("--csv", type=Path, help="also write op_summary columns to this file")
    commands.choices["report"].add_argument("--html", type=Path, help="also write the HTML report to this file")
    commands.choices["plans"].add_argument("--top", type=int, default=15, help="plans to show (default 15)")
    commands.choices["trace"].add_argument("-o", "--output", type=Path, required=True, help="file to write")
    check = commands.add_parser("validate", help="model against public measurements, row by row")
    check.add_argument("--refit", action="store_true", help="print the fitted table of sim_npu.profiles anew")
    return top


def run(options: argparse.Namespace) -> str:
    """What the command prints."""
    if options.command == "validate":
        from sim_npu.validate import refit_text, validation_text  # needs the demonstration kernels; seconds

        return refit_text() if options.refit else validation_text()
    fn = load(options.kernel)
    args = arguments(fn, options.shape, options.dtype)
    named = keywords(options.set)
    if options.command == "plans":
        search = rank_plans(fn, *args, chip=options.chip, cache=options.cache, **named)
        return f"{options.kernel} on {options.chip}\n{search.table(options.top)}"
    plan = TilePlan(
        rows=options.rows,
        chunk=options.chunk,
        residency=options.residency,
        queue_depth=options.depth,
        cores=options.cores,
    )
    report = simulate(fn, *args, chip=options.chip, plan=plan, profile=options.profile, cache=options.cache, **named)
    if options.command == "trace":
        options.output.write_text(trace_json(report))
        return f"{options.output}: open it at https://ui.perfetto.dev or chrome://tracing"
    if options.csv:
        options.csv.write_text(op_summary_csv(report))
    advice = hints(fn, *args, chip=options.chip, plan=plan, cache=options.cache, report=report, **named)
    if options.html:
        options.html.write_text(html_page(report, advice), encoding="utf-8")
    return "\n".join([str(report), "", *hint_lines(advice)])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; user errors are one line on stderr and exit code 2."""
    options = parser().parse_args(argv)
    try:
        print(run(options))
    except (ValueError, TypeError, UnsupportedKernel, OSError) as error:  # TypeError: of a kernel given other shapes
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0

"""Bodies with copies of their own (builder programs): what they do in time, and the bytes they move."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from sim_npu.chips import ChipSpec
from sim_npu.cost import body_cost
from sim_npu.footprint import UbMap
from sim_npu.ir import Copy, CrossCore, Expr, Loop, Stmt, TileProgram, VecOp, walk
from sim_npu.memory import copy_cycles, gap_cost
from sim_npu.schedule import Schedule
from sim_npu.timeline import Event


def explicit_events(
    program: TileProgram,
    body: Sequence[Stmt],
    choose: dict[Expr, int],
    rates: tuple[float, float],
    chip: ChipSpec,
    ub: UbMap,
    cores: int,
) -> list[Event]:
    """Events of a body in program order; vector work between two copies is one block of V.

    A tile copied in is given back after the vector work that follows, one copied out when its copy ends; so is a tile
    of an input queue that is copied out in place.
    Cores that add atomically into one array take turns per 512 B region: with fewer regions than cores they queue.
    """
    events: list[Event] = []
    out_queues = {q.name for q in program.queues if q.role == "out"}
    held: list[str] = []  # input tiles in use
    opened: set[str] = set()
    pending: list[Stmt] = []

    def flush(back: str = "") -> None:
        """Close a block of vector work; the input tile `back` is about to be copied out, which frees it."""
        if back in held:
            held.remove(back)
        if not pending:
            return
        for name in (s.out for s in walk(pending) if isinstance(s, VecOp)):
            if name in out_queues and name not in opened:
                events.append(("open", name))
                opened.add(name)
        cost = body_cost(tuple(pending), chip, ub, choose)
        events.append(("vec", cost.vector + cost.loops))
        events.extend(("free", name) for name in held)
        held.clear()
        pending.clear()

    for stmt in body:
        if isinstance(stmt, Copy):
            flush(stmt.queue if stmt.direction == "out" else "")
            size = stmt.bursts * stmt.burst_bytes
            if stmt.direction == "in":
                kind, gap = "more" if stmt.more else "in", gap_cost(stmt.gap, chip.gap_read_cycles)
                events.append((kind, stmt.queue, copy_cycles(stmt.bursts, size, chip.mte2_head, rates[0], chip, gap)))
                held += [] if stmt.more else [stmt.queue]
            else:
                gap = gap_cost(stmt.gap, chip.gap_write_cycles)
                cycles = copy_cycles(stmt.bursts, size, chip.mte3_head, rates[1], chip, gap)
                if stmt.atomic:
                    cycles *= max(1.0, cores / max(1.0, size / 512)) / chip.atomic_factor
                events.append(("out", stmt.queue, cycles))
                opened.discard(stmt.queue)
        elif isinstance(stmt, CrossCore):
            flush()
            events.append(("sync", sync_cycles(chip) if stmt.kind == "sync" else 0.0))
        elif isinstance(stmt, Loop) and any(isinstance(s, (Copy, CrossCore)) for s in walk(stmt.body)):
            flush()
            events += explicit_events(program, stmt.body, choose, rates, chip, ub, cores) * stmt.count
        else:
            pending.append(stmt)
    flush()
    return events


def check_copies(program: TileProgram, chip: ChipSpec) -> None:
    """Refuse a DataCopyPad of odd bytes where the chip has none.

    Raises:
      ValueError: naming the queue.
    """
    for stmt in walk(program.body):
        if isinstance(stmt, Copy) and stmt.pad and stmt.burst_bytes % 32 and not chip.has_datacopypad:
            raise ValueError(
                f"`{program.name}` copies pieces of {stmt.burst_bytes} B of queue {stmt.queue} with DataCopyPad, which "
                f"{chip.name} does not have. Copy multiples of 32 B with `data_copy`."
            )


def sync_cycles(chip: ChipSpec) -> float:
    """Cycles until all cores have met.

    With SyncAll in hardware, `sync_us`. Without (310P) cores write a flag each to global memory and poll everybody's:
    one write, then a read of all flags, about three times until the last has arrived (assumed).
    """
    if chip.has_syncall:
        return chip.sync_us * chip.clock_mhz
    flags = 32 * chip.cores
    return chip.mte3_head + 32 / chip.mte3_bytes_per_cycle + 3 * (chip.mte2_head + flags / chip.mte2_bytes_per_cycle)


def with_explicit_copies(program: TileProgram, sched: Schedule) -> Schedule:
    """The schedule with the bytes and number of explicit copies added."""
    moved = {"in": [0, 0], "out": [0, 0]}

    def visit(body: Sequence[Stmt], times: int) -> None:
        for stmt in body:
            if isinstance(stmt, Copy):
                moved[stmt.direction][0] += times
                moved[stmt.direction][1] += times * stmt.bursts * stmt.burst_bytes
            elif isinstance(stmt, Loop):
                visit(stmt.body, times * stmt.count)

    visit(program.body, 1)
    steps, mine = program.steps, int(sched.codes.size)
    return dataclasses.replace(
        sched,
        bytes_in=sched.bytes_in + steps * moved["in"][1],
        bytes_out=sched.bytes_out + steps * moved["out"][1],
        copies_in=sched.copies_in + steps * moved["in"][0],
        copies_out=sched.copies_out + steps * moved["out"][0],
        core_bytes_in=sched.core_bytes_in + mine * moved["in"][1],
        core_bytes_out=sched.core_bytes_out + mine * moved["out"][1],
    )

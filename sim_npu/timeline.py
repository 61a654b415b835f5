"""One core's copy units and vector unit in time.

Each step issues its copies in (MTE2), its body (V) and its copies out (MTE3). A copy in waits for a free buffer of
its queue, the body for its inputs and for a free output buffer, a copy out for the body; each unit works in order.
The scalar unit (S) issues all of it: it waits where a buffer is allocated, and stays at most two bodies ahead.
With `queue_depth` buffers per queue the units overlap as far as buffers allow.

The core's state is a handful of times. When the state after a step is the state some steps before, moved by one
constant, the rest of a run of equal steps is that constant over again, so a million equal steps cost a dozen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

Event = tuple
"""`("in" | "more" | "out", queue, cycles)`, `("open" | "free", queue)`, `("vec" | "sync", cycles)`."""

PERIODS = (1, 2, 3, 4)
RECORDED = 400  # intervals kept for pictures and traces, where they are asked for


@dataclass(frozen=True)
class Interval:
    """A unit at work: `unit` is MTE2, V, MTE3 or S; times in cycles from the core's start; `step` counts from 0."""

    unit: str
    name: str
    start: float
    end: float
    step: int


@dataclass
class CoreTimeline:
    """Result of one core: cycles until the last unit stops, and the first intervals."""

    cycles: float
    intervals: list[Interval]
    simulated_steps: int
    steps: int


@dataclass
class _Core:
    """Times at which units and buffers become free."""

    depth: dict[str, int]
    scalar_step: float
    keep: int = 0
    s: float = 0.0
    v_before: float = 0.0
    mte2: float = 0.0
    v: float = 0.0
    mte3: float = 0.0
    ready: dict[str, float] = field(default_factory=dict)
    waiting: dict[str, float] = field(default_factory=dict)
    free: dict[str, deque] = field(default_factory=dict)
    step_no: int = 0
    simulated: int = 0
    log: list[Interval] = field(default_factory=list)

    def buffers(self, queue: str) -> deque:
        if queue not in self.free:
            self.free[queue] = deque([0.0] * self.depth.get(queue, 1))
        return self.free[queue]

    def record(self, unit: str, name: str, start: float, end: float) -> None:
        if len(self.log) < self.keep and end > start:
            self.log.append(Interval(unit, name, start, end, self.step_no))

    def run(self, events: Sequence[Event]) -> None:
        """One step."""
        begin = max(self.s, self.v_before)
        self.s = begin + self.scalar_step
        self.record("S", "step", begin, self.s)
        self.v_before = self.v
        for event in events:
            kind = event[0]
            if kind in ("in", "more"):
                _, queue, cycles = event
                if kind == "in":
                    self.s = max(self.s, self.buffers(queue).popleft())
                start = max(self.mte2, self.s)
                self.mte2 = self.ready[queue] = start + cycles
                self.record("MTE2", queue, start, self.mte2)
            elif kind == "open":
                self.waiting[event[1]] = self.buffers(event[1]).popleft()
            elif kind == "vec":
                cycles = event[1]
                start = max(self.v, self.s, *self.ready.values(), *self.waiting.values())
                self.ready.clear()
                self.waiting.clear()
                self.v = start + cycles
                self.record("V", "body", start, self.v)
            elif kind == "free":
                self.buffers(event[1]).append(self.v)
            elif kind == "out":
                _, queue, cycles = event
                start = max(self.mte3, self.v)
                self.mte3 = start + cycles
                self.buffers(queue).append(self.mte3)
                self.record("MTE3", queue, start, self.mte3)
            elif kind == "sync":
                now = max(self.mte2, self.v, self.mte3, self.s) + event[1]
                self.mte2 = self.v = self.mte3 = self.s = now
        self.step_no += 1
        self.simulated += 1

    def state(self) -> np.ndarray:
        """All times that can still matter: whatever starts next starts after S, so earlier times count as S."""
        times = [self.s, self.mte2, self.v, self.mte3, self.v_before]
        for queue in self.free.values():
            times.extend(queue)
        times.extend(self.ready.values())
        times.extend(self.waiting.values())
        return np.maximum(np.array(times), self.s)

    def shift(self, cycles: float, steps: int) -> None:
        """Jump over `steps` steps that take `cycles`."""
        self.s += cycles
        self.v_before += cycles
        self.mte2 += cycles
        self.v += cycles
        self.mte3 += cycles
        for queue in self.free:
            self.free[queue] = deque(t + cycles for t in self.free[queue])
        self.ready = {q: t + cycles for q, t in self.ready.items()}
        self.waiting = {q: t + cycles for q, t in self.waiting.items()}
        self.step_no += steps

    def end(self) -> float:
        return max(self.s, self.mte2, self.v, self.mte3)


def _repeat(core: _Core, count: int, once: Callable[[], None], steps: int) -> None:
    """Call `once` `count` times, jumping as soon as the state repeats up to a constant; it advances `steps` steps."""
    history: list[np.ndarray] = [core.state()]
    done = 0
    while done < count:
        once()
        done += 1
        now = core.state()
        for period in PERIODS:
            if len(history) < 2 * period or done == count or len(core.log) < core.keep:
                continue
            delta = now - history[-period] if history[-period].shape == now.shape else None
            before = history[-period] - history[-2 * period] if history[-2 * period].shape == now.shape else None
            if delta is None or before is None or not _close(delta, delta[0]):
                continue
            if _close(delta, before):
                jump = (count - done) // period
                core.shift(float(delta[0]) * jump, steps * period * jump)
                done += jump * period
                now = core.state()
                history.clear()
                break
        history.append(now)
        if len(history) > 2 * max(PERIODS):
            history.pop(0)


def _close(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal within 1e-6 cycles or 1e-9 of the value (np.allclose, a dozen times faster on a handful of numbers)."""
    return bool((np.abs(a - b) <= 1e-6 + 1e-9 * np.abs(b)).all())


def _distinct(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distinct rows and, per row, its number. Rows are compared as bytes: np.unique(axis=0) makes a field per column.

    >>> _distinct(np.array([[1, 2], [3, 4], [1, 2]]))[1]
    array([0, 1, 0])
    """
    whole = np.ascontiguousarray(codes)
    as_bytes = whole.view(np.dtype((np.void, whole.itemsize * whole.shape[1]))).reshape(-1)
    _, first, kinds = np.unique(as_bytes, return_index=True, return_inverse=True)
    return whole[first], kinds.reshape(-1)


def _runs(codes: np.ndarray) -> list[tuple[int, int]]:
    """(code, length) of each run of equal codes."""
    edges = np.flatnonzero(np.diff(codes)) + 1
    starts = np.concatenate([[0], edges])
    lengths = np.diff(np.concatenate([starts, [len(codes)]]))
    return [(int(codes[s]), int(n)) for s, n in zip(starts, lengths)]


def run_core(
    codes: np.ndarray,
    events: Sequence[Sequence[Event]],
    depth: dict[str, int],
    *,
    scalar_step: float = 0.0,
    setup: float = 0.0,
    record: int = 0,
) -> CoreTimeline:
    """Time of one core.

    Args:
      codes: `[parallel positions, sequential steps]`, kind of each step.
      events: per kind, what a step does in program order.
      depth: buffers per queue (1 where missing).
      scalar_step: scalar cycles to issue a step.
      setup: scalar cycles before the first.
      record: intervals to keep; no step is skipped until they are.

    >>> step = [("in", "x", 100.0), ("open", "y"), ("vec", 60.0), ("free", "x"), ("out", "y", 50.0)]
    >>> one, two = (run_core(np.zeros((1, 1000), int), [step], {"x": d, "y": d}).cycles for d in (1, 2))
    >>> one, two
    (160050.0, 100110.0)
    """
    core = _Core(depth, scalar_step, record)
    core.record("S", "set-up", 0.0, setup)
    core.s = setup
    # Positions with the same sequence of kinds are one kind of position.
    rows, kinds = _distinct(codes) if codes.shape[1] > 1 else (None, codes[:, 0])
    width = codes.shape[1]

    def position(kind: int) -> None:
        if rows is None:
            core.run(events[kind])
            return
        for code, length in _runs(rows[kind]):
            _repeat(core, length, lambda code=code: core.run(events[code]), 1)  # type: ignore[misc]

    for kind, length in _runs(kinds):
        _repeat(core, length, lambda kind=kind: position(kind), width)  # type: ignore[misc]
    return CoreTimeline(core.end(), core.log, core.simulated, codes.size)

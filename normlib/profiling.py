"""What norms cost on the simulated AI Core: every kernel of a step, and their share of a whole step."""

from __future__ import annotations

import contextlib
import html
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

import sim_npu
from normlib import passes
from normlib.passes.recording import Recording, layout, recording

KERNEL = "Pallas kernel"


@dataclass(frozen=True)
class OperatorCost:
    """One kernel of a profile, all its launches together.

    Attributes:
      name: of the kernel.
      shape, dtype: of its first operand.
      chip: name of the chip.
      launches: how often it was launched.
      us: simulated time of all launches, µs.
      bytes: read from and written to memory by all launches.
      bound: the busiest unit: MTE2 (copies in), V (vector) or MTE3 (copies out).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    chip: str
    launches: int
    us: float
    bytes: int
    bound: str


@dataclass(eq=False)
class Profile:
    """The norms that ran inside `profile()`; `str(profile)` is a table, largest first."""

    _recording: Recording = field(default_factory=Recording)
    _found: list[OperatorCost] | None = None

    @property
    def operators(self) -> list[OperatorCost]:
        """One entry per kernel, shape and chip, the largest time first. Final when the context has ended."""
        if self._found is None:
            jax.effects_barrier()
        return self._found if self._found is not None else _summed(self._recording)

    @property
    def elsewhere(self) -> list[str]:
        """Arrays whose norms run as plain XLA inside the npu backend, as "dtype shape": float64 and complex ones."""
        return list(self._recording.elsewhere)

    @property
    def launches(self) -> int:
        """Kernel launches in all."""
        return sum(op.launches for op in self.operators)

    @property
    def us(self) -> float:
        """Simulated time of all kernels one after another, µs."""
        return sum(op.us for op in self.operators)

    @property
    def bytes(self) -> int:
        """Bytes read and written by all kernels."""
        return sum(op.bytes for op in self.operators)

    def __str__(self) -> str:
        without = [f"without kernels, as plain XLA: {', '.join(self.elsewhere)}"] if self.elsewhere else []
        if not self.operators:
            nothing = "norms: no kernel ran; only norms inside use_backend('npu') are counted, while they run"
            return "\n".join([nothing, *without])
        total = self.us or 1.0
        lines = [
            f"norms: {self.us:.1f} us in {self.launches} kernel launches, {self.bytes / 1e6:.2f} MB   (a model)",
            f"{'kernel':<20} {'shape':<20} {'dtype':<9} {'chip':<8} {'launches':>8} {'us each':>9} {'us':>10} "
            f"{'share':>6} {'MB':>9}  bound",
        ]
        for op in self.operators:
            lines.append(
                f"{op.name:<20} {'x'.join(map(str, op.shape)):<20} {op.dtype:<9} {op.chip:<8} {op.launches:>8} "
                f"{op.us / op.launches:9.2f} {op.us:10.1f} {op.us / total:6.0%} {op.bytes / 1e6:9.2f}  {op.bound}"
            )
        return "\n".join([*lines, *without])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


@contextlib.contextmanager
def profile() -> Iterator[Profile]:
    """Collect what every norm that runs inside on the npu backend costs on its simulated chip.

    Functions compiled before are traced anew inside, so that their norms are seen; launches are counted while they run
    (a loop's at every turn, every device's under shard_map). A kernel under `jax.vmap` counts once, with the shape it
    has inside. What `jax.checkpoint` computes again is not counted again, since JAX repeats no callback; `profile_step`
    lays it out. Other threads are not seen.

    Yields:
      A `Profile`: `operators`, `launches`, `us`, `bytes`, `elsewhere`; print it for the table.

    Raises:
      RuntimeError: inside a function that is being traced, where nothing runs yet.

    Source: the cost model is `sim_npu.simulate`'s; see docs/simulator.md.

    >>> from normlib import layer_norm, use_backend
    >>> with use_backend("npu", chip="910b2"), profile() as found:
    ...     y = jax.jit(layer_norm)(jnp.ones((64, 256)))
    >>> [(op.name, op.launches) for op in found.operators]
    [('layer_norm', 1)]
    """
    if isinstance(jnp.zeros(()), jax.core.Tracer):
        raise RuntimeError(
            "`profile` counts what runs, and inside jit nothing does yet: put it around the jitted call."
        )
    found = Profile()
    with recording(found._recording):
        yield found
    jax.effects_barrier()
    found._found = _summed(found._recording)


def _summed(made: Recording) -> list[OperatorCost]:
    sums: dict[tuple, OperatorCost] = {}  # by chip, not by its name: two may have the same
    for call in made.calls:
        if not call.runs:
            continue
        report = sim_npu.simulate(call.kernel, *call.shapes, chip=call.chip)
        first = call.shapes[0]
        for k in report.kernels:
            what = (k.name, first.shape, first.dtype.name)
            key = (*what, report.chip)
            before = sums.get(key)
            n, us, moved = (before.launches, before.us, before.bytes) if before else (0, 0.0, 0)
            sums[key] = OperatorCost(
                *what,
                report.chip.name,
                n + call.runs,
                us + call.runs * k.total_us,
                moved + call.runs * k.traffic.total,
                k.bottleneck,
            )
    return sorted(sums.values(), key=lambda op: -op.us)


@dataclass(frozen=True)
class StepProfile:
    """A whole step laid out on the simulated chip, with its norms as tile kernels.

    Attributes:
      report: the whole step, `sim_npu.StepReport`.
      elsewhere: arrays whose norms are no kernels, as "dtype shape": float64, complex.
    """

    report: sim_npu.StepReport
    elsewhere: tuple[str, ...] = ()

    @property
    def us(self) -> float:
        """Time of the whole step, µs."""
        return self.report.total_us

    @property
    def norm_us(self) -> float:
        """Time of the norms' kernels, µs."""
        return sum(op.us for op in self.report.ops if op.kind == KERNEL)

    @property
    def norm_share(self) -> float:
        """Share of the step that the norms' kernels take, 0 to 1."""
        return self.norm_us / self.us if self.us else 0.0

    @property
    def launches(self) -> int:
        """Launches of the norms' kernels."""
        return sum(op.times for op in self.report.ops if op.kind == KERNEL)

    @property
    def bytes(self) -> float:
        """Bytes that the norms' kernels read and write."""
        return sum(op.bytes for op in self.report.ops if op.kind == KERNEL)

    def __str__(self) -> str:
        head = (
            f"norms: {self.norm_us:.1f} of {self.us:.1f} us ({self.norm_share:.1%}), {self.launches} launches, "
            f"{self.bytes / 1e6:.2f} MB"
        )
        head += f"\nwithout kernels: {', '.join(self.elsewhere)}" if self.elsewhere else ""
        return f"{head}\n{self.report}"

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(str(self).splitlines()[0])}</p>{self.report._repr_html_()}"


def profile_step(fn: Callable[..., Any], *args: Any, chip: Any = "910b2", **options: Any) -> StepProfile:
    """Lay out a whole function, a train step say, on the simulated chip; nothing is run.

    Norms are the tile kernels of the npu backend, simulated tile by tile; all else is priced by
    `sim_npu.simulate_step`'s rules.

    Args:
      fn: a JAX function that calls norms of normlib (their layers too).
      args: its arguments: arrays, ShapeDtypeStructs or `(shape, dtype)` pairs, nested as `fn` likes.
      chip: name or `sim_npu.ChipSpec`.
      options: keyword arguments of `fn`, and `fuse`, `formats`, `cache` and `branches` of `sim_npu.simulate_step`; of
        branches the cheapest is laid out by default: a batch norm redoes its statistics only where the running mean is
        far off.

    Returns:
      `StepProfile`: `us`, `norm_us`, `norm_share`, `launches`, `bytes`; print it for the table.

    Raises:
      ValueError: for an unknown chip or format.

    >>> from normlib import rms_norm
    >>> found = profile_step(lambda x, w: rms_norm(x @ w), ((256, 256), "float32"), ((256, 256), "float32"))
    >>> found.launches, 0 < found.norm_share < 1
    (1, True)
    """
    seen = Recording()
    with passes.use_backend("npu", chip=chip), layout(), recording(seen):
        report = sim_npu.simulate_step(fn, *args, chip=chip, **{"branches": "cheapest"} | options)
    return StepProfile(report, tuple(seen.elsewhere))

"""Profiles: `ideal` is the model alone; `as_shipped` adds what shipped kernels were measured to lose against it.

    as_shipped = launch + factor · (ideal time without launch) + per_mb · (bytes of all arrays once)

Fitted per chip, and per operator where it was measured, on the fit rows of `sim_npu.validate` only, by least absolute
relative error with non-negative terms. With factor 0 it is the naive formula, with factor 1 and per_mb 0 it is `ideal`;
how strongly it is held to `ideal` is chosen by leave-one-out error on the same rows (`sim_npu.fitting`), by one rule
for every chip and operator. `python -m sim_npu validate --refit` prints this table anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sim_npu.chips import ChipSpec
from sim_npu.result import KernelResult


@dataclass(frozen=True)
class Shipped:
    """Launch in µs, factor of the ideal time, µs per MB moved; `strength` of the prior they were fitted with."""

    launch: float
    factor: float
    per_mb: float
    strength: float

    def us(self, core_us: float, moved: float) -> float:
        """Device time from the ideal time without launch and the bytes of all arrays.

        >>> Shipped(2.0, 1.0, 0.5, 0.0).us(10.0, 4e6)
        14.0
        """
        return self.launch + self.factor * core_us + self.per_mb * moved / 1e6


# (chip, operator); operator "" is all of a chip's measured operators together
SHIPPED: dict[tuple[str, str], Shipped] = {
    ("910b2", ""): Shipped(launch=2.7365, factor=1.3112, per_mb=0.0535, strength=1.0),
    ("910b2", "rms_norm"): Shipped(launch=3.7696, factor=1.2777, per_mb=0.0701, strength=0.3),
    ("910b2", "group_norm"): Shipped(launch=4.3425, factor=1.0116, per_mb=0.022, strength=0.03),
    ("950", ""): Shipped(launch=0.7845, factor=1.0765, per_mb=0.0, strength=1.0),
    ("950", "rms_norm"): Shipped(launch=1.3046, factor=1.007, per_mb=0.0031, strength=100.0),
    ("950", "group_norm"): Shipped(launch=4.6345, factor=0.96, per_mb=0.0, strength=0.0),
    ("950", "batch_norm_grad_v3"): Shipped(launch=1.1635, factor=0.9223, per_mb=0.0, strength=10.0),
}


def core_and_bytes(kernels: Sequence[KernelResult]) -> tuple[float, float]:
    """(time without launches in µs, bytes of all arrays once) of some kernels, one after the other."""
    moved = sum(k.traffic.unique_reads + k.traffic.unique_writes for k in kernels)
    return sum(k.total_us - k.launch_us for k in kernels), float(moved)


def shipped(profile: str, chip: ChipSpec) -> Shipped:
    """The constants of `as_shipped` or `as_shipped:operator` on a chip.

    Raises:
      ValueError: if the chip, or the operator on it, was not measured.
    """
    operator = profile.partition(":")[2]
    if (chip.name, operator) not in SHIPPED:
        known = ", ".join(f"{c} {'as_shipped:' + o if o else 'as_shipped'}" for c, o in SHIPPED)
        raise ValueError(f"`profile` {profile!r} has no measurements on {chip.name}; there are: {known}. Use 'ideal'.")
    return SHIPPED[chip.name, operator]


def shipped_us(profile: str, chip: ChipSpec, kernels: Sequence[KernelResult]) -> float:
    """Device time under `as_shipped` or `as_shipped:operator`; raises as `shipped`."""
    return shipped(profile, chip).us(*core_and_bytes(kernels))

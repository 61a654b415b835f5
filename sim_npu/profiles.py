"""Profiles: `ideal` is the model alone; `as_shipped` adds what shipped kernels were measured to lose against it.

    as_shipped = launch + factor * (ideal time without launch)

Both numbers are fitted per chip, and per operator where it was measured, on the fit rows of `sim_npu.validate` only,
by least absolute relative error. The form was chosen by leave-one-out error on the fit rows, among forms with terms
per row, per element and per float32 element as well. `python -m sim_npu validate --refit` prints this table anew.
"""

from __future__ import annotations

from sim_npu.chips import ChipSpec

# (chip, operator) -> (launch in µs, factor); operator "" is all of a chip's measured operators together
SHIPPED: dict[tuple[str, str], tuple[float, float]] = {
    ("910b2", ""): (3.7237, 1.2336),
    ("910b2", "rms_norm"): (3.4781, 1.3025),
    ("910b2", "group_norm"): (6.0642, 0.6412),
    ("950", ""): (0.2938, 1.0181),
    ("950", "rms_norm"): (1.0718, 1.0125),
    ("950", "group_norm"): (6.1695, 0.6176),
    ("950", "batch_norm_grad_v3"): (3.0471, 0.2190),
}


def shipped_us(profile: str, chip: ChipSpec, core_us: float) -> float:
    """Device time under `as_shipped` or `as_shipped:operator`, from the ideal time without launch.

    Raises:
      ValueError: if the chip, or the operator on it, was not measured.
    """
    operator = profile.partition(":")[2]
    if (chip.name, operator) not in SHIPPED:
        known = ", ".join(f"{c} {'as_shipped:' + o if o else 'as_shipped'}" for c, o in SHIPPED)
        raise ValueError(f"`profile` {profile!r} has no measurements on {chip.name}; there are: {known}. Use 'ideal'.")
    launch, factor = SHIPPED[chip.name, operator]
    return launch + factor * core_us

"""What the arithmetic of an AI Core rounds, and when: `PrecisionPolicy` and its presets.

A kernel is written once, usually in float32. A policy says which type every vector result is rounded to, what type
sums are accumulated in and in which order. `sim_npu.emulate` evaluates the kernel under it.

Results are of one of four kinds, tracked while the kernel is evaluated:

  constant     made of literals, program ids and iota only; float32, rounded when it meets one of the others
  statistic    made of sums (and constants) only; rounded to `accumulator`
  input        made of kernel inputs (and constants) only; rounded to `data`
  normalised   made of inputs and statistics; rounded to `data`

so that a mean, a variance and a running accumulator stay wide in a kernel whose rows are fp16.
"""

from __future__ import annotations

import dataclasses
import enum
import numbers
from typing import Literal, get_args

from sim_npu.chips import ChipSpec, get_chip
from sim_npu.rounding import FORMATS, MODES, OVERFLOWS, Mode, Overflow

Order = Literal["sequential", "lanes64", "tree", "repeats", "halving", "native"]
ORDERS: tuple[str, ...] = get_args(Order)

# The type of the kernel's own 16-bit input; see PrecisionPolicy.data.
FROM_INPUT = "input"


class Kind(enum.IntFlag):
    """What a value is made of. `a | b` is the kind of a result of both: statistic | input is normalised."""

    CONSTANT = 0
    STATISTIC = 1
    INPUT = 2
    NORMALISED = 3


def _is_whole(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


@dataclasses.dataclass(frozen=True)
class PrecisionPolicy:
    """Types, order and rounding of a kernel's arithmetic.

    Values that the kernel itself gives a 16-bit or 8-bit type are rounded to that type, whatever the policy says.

    Attributes:
      data: format of vector results: a name of `sim_npu.rounding.FORMATS`, or "input" for the narrowest float type
        among the kernel's inputs.
      accumulator: format that sums are accumulated in and that statistics are kept in.
      order: of the sum along the last axis, D elements; see `sim_npu.reduction`.
      cast: rounding of narrowing casts written in the kernel, and of results in a format without arithmetic of its
        own (all but fp16 and fp32). fp16 and fp32 arithmetic rounds half to even.
      overflow: "inf", "saturate" or "nan", as in `round_to`.
      wide_statistics: values that only feed sums (squares, say) are kept in `accumulator`, except sums of inputs.
      widen_bf16: input values of bf16 data stay float32; rounding to bf16 starts with the first normalised value.
      scale_before_sum: a sum that is at once divided by a constant n is taken over values times 1/n.
      int8_chain: a cast to int8 is rint to int32, then fp16, then trunc.
      arrival_seed: the steps of a kernel with an atomic add arrive in an order drawn from this seed, as cores do that
        run at once; None for the order of the grid.
      approximate_bits: `rsqrt` and `reciprocal` keep this many fraction bits; None for square root, then division.

    Raises:
      ValueError: on an unknown format, order, mode or overflow rule, or a value of another type.

    >>> PRESETS["fp16_fp32acc"].accumulator
    'fp32'
    >>> dataclasses.replace(PRESETS["fp16"], order="sequential").order
    'sequential'
    """

    data: str = "fp32"
    accumulator: str = "fp32"
    order: Order = "lanes64"
    cast: Mode = "rint"
    overflow: Overflow = "inf"
    wide_statistics: bool = False
    widen_bf16: bool = False
    scale_before_sum: bool = False
    int8_chain: bool = False
    arrival_seed: int | None = None
    approximate_bits: int | None = None

    def __post_init__(self) -> None:
        for name, value, known in (
            ("data", self.data, (*FORMATS, FROM_INPUT)),
            ("accumulator", self.accumulator, tuple(FORMATS)),
            ("order", self.order, ORDERS),
            ("cast", self.cast, MODES),
            ("overflow", self.overflow, OVERFLOWS),
        ):
            if value not in known:
                raise ValueError(f"`{name}` must be one of {', '.join(known)}; got {value!r}.")
        bits, seed = self.approximate_bits, self.arrival_seed
        if bits is not None and not (_is_whole(bits) and 1 <= bits <= 22):
            raise ValueError(f"`approximate_bits` must be a whole number from 1 to 22 or None; got {bits!r}.")
        if seed is not None and not (_is_whole(seed) and seed >= 0):
            raise ValueError(f"`arrival_seed` must be a whole number of at least 0 or None; got {seed!r}.")
        for name in ("wide_statistics", "widen_bf16", "scale_before_sum", "int8_chain"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"`{name}` must be True or False; got {getattr(self, name)!r}.")

    def for_inputs(self, dtypes: tuple[str, ...]) -> PrecisionPolicy:
        """The policy with `data="input"` decided by the dtype names of a kernel's inputs.

        >>> PRESETS["ascend_a2"].for_inputs(("bfloat16", "float32")).data
        'bf16'
        """
        if self.data != FROM_INPUT:
            return self
        narrow = {"float16": "fp16", "bfloat16": "bf16"}
        found = [narrow[d] for d in dtypes if d in narrow]
        return dataclasses.replace(self, data=found[0] if found else "fp32")

    def format_of(self, kind: Kind, *, feeds_sum: bool = False) -> str:
        """Format that a result of this kind is rounded to; "fp32" for none."""
        if kind == Kind.CONSTANT:
            return "fp32"
        if kind == Kind.STATISTIC or (feeds_sum and self.wide_statistics):
            return self.accumulator
        if kind == Kind.INPUT and self.widen_bf16 and self.data == "bf16":
            return "fp32"
        return self.data

    def arithmetic_mode(self, format: str) -> Mode:
        """Rounding of arithmetic results in `format`."""
        return "rint" if format in ("fp16", "fp32") else self.cast


# Rounding points of the shipped A2 kernels (ops-nn AddRmsNorm and RmsNorm): fp16 adds, x*rstd and *scale each round to
# fp16, squares are float32 and scaled by 1/D before the sum; bf16 is widened, statistics come from the unrounded sum,
# and the row is rounded before and after the scale. RmsNorm folds halves down to 64 lanes, then sums in a tree.
# The kernels of the 950 and plain RmsNorm compute in float32 and round once.
_A2 = PrecisionPolicy(
    data=FROM_INPUT,
    order="halving",
    wide_statistics=True,
    widen_bf16=True,
    scale_before_sum=True,
    int8_chain=True,
)

PRESETS: dict[str, PrecisionPolicy] = {
    "fp32": PrecisionPolicy(),
    "fp16_fp32acc": PrecisionPolicy(data="fp16"),
    "bf16_fp32acc": PrecisionPolicy(data="bf16"),
    "fp16": PrecisionPolicy(data="fp16", accumulator="fp16"),
    "fp16_sequential": PrecisionPolicy(data="fp16", accumulator="fp16", order="sequential"),
    "fp16_lanes64": PrecisionPolicy(data="fp16", accumulator="fp16", order="lanes64"),
    "fp16_tree": PrecisionPolicy(data="fp16", accumulator="fp16", order="tree"),
    "ascend_a2": _A2,
    "ascend_a2_round_once": PrecisionPolicy(order="halving", int8_chain=True),
    # How many bits Rsqrt and Reciprocal of the A2 really keep is not published: 8 is assumed.
    "ascend_a2_approximate": dataclasses.replace(_A2, approximate_bits=8),
    "ascend_950": PrecisionPolicy(order="tree"),
}


def resolve(
    precision: PrecisionPolicy | str | None, order: Order | None, chip: ChipSpec | str | None
) -> PrecisionPolicy:
    """The policy meant by the arguments of `emulate`.

    Without `precision`, a chip that sums in a tree means "ascend_950", any other chip "ascend_a2", no chip "fp32".
    `order` wins over the policy's. A chip without `order` gives a policy named by `precision` the order of its
    ReduceSum.

    Raises:
      ValueError: on an unknown preset or order.

    >>> resolve("fp16", "tree", None).order
    'tree'
    >>> resolve("fp16", None, "910b2").order
    'repeats'
    """
    spec = None if chip is None else get_chip(chip)
    if precision is None:
        precision = "fp32" if spec is None else "ascend_950" if spec.tree_reduce else "ascend_a2"
    elif spec is not None and order is None:
        order = "tree" if spec.tree_reduce else "repeats"
    if isinstance(precision, str):
        if precision not in PRESETS:
            raise ValueError(
                f"`precision` must be a PrecisionPolicy or one of {', '.join(PRESETS)}; got {precision!r}."
            )
        precision = PRESETS[precision]
    elif not isinstance(precision, PrecisionPolicy):
        raise ValueError(f"`precision` must be a PrecisionPolicy or a preset's name; got {precision!r}.")
    return precision if order is None else dataclasses.replace(precision, order=order)

"""The kinds of quantisation: small frozen data classes, checked when built.

They are pytrees: arrays in them (scales, zero points, smoothing, keys) pass through jit, vmap and grad.
"""

from __future__ import annotations

import dataclasses
from typing import Any, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import PRNGKeyArray

from normlib import _arguments as check
from normlib.quantize._formats import FORMATS, MODES, Format, format_of

TINY = 2.0**-126  # the smallest normal float32: below it XLA on CPU flushes to 0, and 1 / s would be infinite
HUGE = 2.0**126  # beyond it 1 / s is subnormal
FLOATS = tuple(name for name, f in FORMATS.items() if not f.is_integer)
SYMMETRIC = ("int8", "int4", *FLOATS)
MAX_ZERO_POINT = 2**24


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def _kind(*arrays: str):
    """Class decorator: a frozen data class, registered as a pytree whose leaves are the fields `arrays`.

    Unflattening sets the fields as they are, without the checks: JAX rebuilds pytrees with placeholders in them.
    """

    def decorate(cls):
        cls = dataclasses.dataclass(frozen=True, eq=False)(cls)
        static = tuple(f.name for f in dataclasses.fields(cls) if f.name not in arrays)

        def flatten(kind):
            leaves = [(jax.tree_util.GetAttrKey(name), getattr(kind, name)) for name in arrays]
            return leaves, tuple(getattr(kind, name) for name in static)

        def unflatten(aux, leaves):
            kind = object.__new__(cls)
            for name, value in (*zip(arrays, leaves), *zip(static, aux)):
                object.__setattr__(kind, name, value)
            return kind

        jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)
        return cls

    return decorate


class Kind:
    """What the kinds share: the format of their codes, and its checks."""

    dtype: DTypeLike
    rounding: str
    key: PRNGKeyArray | None

    @property
    def format(self) -> Format:
        return FORMATS[jnp.dtype(self.dtype).name]

    def _check(self, allowed: tuple[str, ...]) -> None:
        form = format_of(self.dtype, allowed)
        object.__setattr__(self, "dtype", form.dtype)
        modes = MODES if form.is_integer else ("rint", "stochastic")
        check.one_of(self.rounding, modes, "rounding")
        if (self.rounding == "stochastic") != (self.key is not None):
            raise ValueError(
                "`key` goes with rounding='stochastic' and with no other; "
                f"got {'a' if self.key is not None else 'no'} key with rounding={self.rounding!r}."
            )

    def _check_floor(self, floor: Any) -> None:
        if isinstance(floor, bool) or not isinstance(floor, int | float) or not TINY <= floor <= HUGE:
            raise ValueError(
                f"`floor` must be a number in [2**-126, 2**126], so that 1 / floor is finite; got {floor!r}."
            )


@_kind("scale", "zero_point", "key")
class Static(Kind):
    """Codes by a scale known beforehand: q = sat(rint(n * inv) + zero_point), inv = 1 / scale, in float32.

    Attributes:
      scale: positive, in units of n; a scalar, of n's feature shape, or of n's rank and broadcastable to it. Normal
        float32 numbers up to 2**126 (a traced scale is taken at its word).
      zero_point: integer, likewise, |zero_point| <= 2**24, added after rounding; integer formats only. None for 0.
      dtype: int8, uint8, int4, float8_e4m3fn, float8_e5m2 or float4_e2m1fn.
      multiply: q = sat(rint(n * scale) + zero_point): the scale is the reciprocal of the step.
      rounding: of integers "rint" (half to even), "half_away", "floor", "ceil", "trunc" or "stochastic"; of floats
        "rint" or "stochastic".
      key: a JAX random key, for "stochastic".
      lowest: smallest integer code; the format's where None (-127 for a symmetric int8).

    NaN gives the integer code 0; it stays NaN in fp8 and gives 0 in fp4. Infinities saturate.

    Raises:
      ValueError: for another dtype, rounding or range of codes, a scale that is not positive and normal, a key without
        "stochastic" or the reverse, or a zero point beside a float format.
      TypeError: for a zero point that is not an integer.

    >>> Static(0.5).dtype
    dtype('int8')
    """

    scale: ArrayLike
    zero_point: ArrayLike | None = None
    dtype: DTypeLike = dataclasses.field(default=jnp.int8, kw_only=True)
    multiply: bool = dataclasses.field(default=False, kw_only=True)
    rounding: str = dataclasses.field(default="rint", kw_only=True)
    key: PRNGKeyArray | None = dataclasses.field(default=None, kw_only=True)
    lowest: int | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self):
        self._check(tuple(FORMATS))
        _check_scale(self.scale, "scale")
        form = self.format
        if self.zero_point is not None:
            if not form.is_integer:
                raise ValueError(f"`zero_point` goes with integer codes only; leave it None for {form.name}.")
            _check_zero_point(self.zero_point)
        if self.lowest is not None and not (form.is_integer and form.lowest <= self.lowest <= 0):
            raise ValueError(
                f"`lowest` must be a code of an integer format, at most 0; got {self.lowest} for {form.name}."
            )

    @property
    def smallest_code(self) -> float:
        return self.format.lowest if self.lowest is None else self.lowest


@_kind("smooth", "key")
class Dynamic(Kind):
    """Codes by a scale found in each row: s = max(max|n * smooth| / largest, floor), q = round((n * smooth) / s).

    The quotient by s is the product with its correctly rounded reciprocal. Symmetric: -128 (int8) and -8 (int4) never
    appear; a zero row has codes 0 and scale `floor`; a NaN in a row makes its scale NaN.

    Attributes:
      smooth: factors on n, of n's feature shape, or of n's rank and broadcastable to it; None for ones.
      dtype: int8, int4, float8_e4m3fn, float8_e5m2 or float4_e2m1fn.
      floor: smallest scale, a normal float32 number.
      group: entries along the last axis that share a scale; None for a row. Must divide that axis.
      rounding: of integers "rint", "half_away", "floor", "ceil", "trunc" or "stochastic"; of floats "rint" or
        "stochastic".
      key: a JAX random key, for "stochastic".

    Raises:
      ValueError: for another dtype or rounding, a floor or group out of range, or a key without "stochastic" or the
        reverse.

    >>> Dynamic(dtype=jnp.int4).format.largest
    7
    """

    smooth: ArrayLike | None = None
    dtype: DTypeLike = dataclasses.field(default=jnp.int8, kw_only=True)
    floor: float = dataclasses.field(default=TINY, kw_only=True)
    group: int | None = dataclasses.field(default=None, kw_only=True)
    rounding: str = dataclasses.field(default="rint", kw_only=True)
    key: PRNGKeyArray | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self):
        self._check(SYMMETRIC)
        self._check_floor(self.floor)
        if self.group is not None and (
            not isinstance(self.group, int) or isinstance(self.group, bool) or self.group < 1
        ):
            raise ValueError(f"`group` must be a positive number of entries, or None for a row; got {self.group!r}.")


@_kind("key")
class Asymmetric(Kind):
    """int8 codes over each row's own range: s = max((max - min) / 255, floor), zp = -128 - rint(min / s),
    q = sat(rint(n / s) + zp); quotients by s are products with its correctly rounded reciprocal.

    zp is an int32: a row far from 0 has one outside of int8. Dequantised, (q - zp) * s lies within s of n; so that this
    holds for a row that is constant or nearly so, its floor is at least 2**-21 of its largest magnitude.

    Attributes:
      floor: smallest scale, a normal float32 number.
      rounding: "rint", "half_away", "floor", "ceil", "trunc" or "stochastic".
      key: a JAX random key, for "stochastic".

    A NaN or two infinities in a row make its scale NaN or infinite; NaN gives the code 0.

    Raises:
      ValueError: for another rounding, a floor out of range, or a key without "stochastic" or the reverse.

    >>> Asymmetric().dtype
    dtype('int8')
    """

    floor: float = dataclasses.field(default=TINY, kw_only=True)
    rounding: str = dataclasses.field(default="rint", kw_only=True)
    key: PRNGKeyArray | None = dataclasses.field(default=None, kw_only=True)
    dtype: DTypeLike = dataclasses.field(default=jnp.int8, kw_only=True)

    def __post_init__(self):
        self._check(("int8",))
        self._check_floor(self.floor)


@_kind("key")
class MX(Kind):
    """Codes in blocks of 32 along the last axis that share a power of two (OCP Microscaling); a partial last block is
    allowed.

    The shared exponent is clamp(floor(log2(max|n|)) - emax, -127, 127), emax 2 (e2m1), 8 (e4m3), 15 (e5m2); the scale
    is the byte exponent + 127, `[..., ceil(D / 32)]` uint8. Elements saturate. A block of zeros has byte 0; a NaN or an
    infinity gives its block byte 255 (NaN) and codes 0.

    Attributes:
      dtype: float4_e2m1fn, float8_e4m3fn or float8_e5m2.
      scale_alg: 0 as above; 1 (fp8): the exponent of max|n| / largest, rounded up, so that nothing saturates.
      rounding: "rint" (half to even) or "stochastic".
      key: a JAX random key, for "stochastic".

    Raises:
      ValueError: for another dtype, rounding or scale_alg, or a key without "stochastic" or the reverse.

    Source: OCP Microscaling Formats (MX) Specification v1.0, section 6.3.

    >>> MX(jnp.float8_e4m3fn).format.max_exponent
    8
    """

    dtype: DTypeLike = jnp.float4_e2m1fn
    scale_alg: int = dataclasses.field(default=0, kw_only=True)
    rounding: str = dataclasses.field(default="rint", kw_only=True)
    key: PRNGKeyArray | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self):
        self._check(FLOATS)
        if self.scale_alg not in (0, 1):
            raise ValueError(f"`scale_alg` must be 0 or 1; got {self.scale_alg!r}.")
        if self.scale_alg == 1 and self.format.name == "float4_e2m1fn":
            raise ValueError("`scale_alg` 1 is for fp8; use 0 with float4_e2m1fn.")


ONE_OUTPUT = (Static, Dynamic, Asymmetric, MX)


@_kind("first", "second")
class Dual:
    """Two quantisations of one normalisation: two kinds, two sets of codes and scales.

    Attributes:
      first: Static, Dynamic, Asymmetric or MX.
      second: likewise.

    Raises:
      TypeError: if either is something else.

    >>> Dual(Static(0.5), Static(0.25)).second.scale
    0.25
    """

    first: Any
    second: Any

    def __post_init__(self):
        for name in ("first", "second"):
            _check_one_of(getattr(self, name), ONE_OUTPUT, name)


@_kind("kind")
class StraightThrough:
    """For training: y is the dequantised value, in the norm's dtype, and gradients pass as if nothing was rounded.

    They pass where the code did not saturate and are 0 where it did; scales and zero points get none.

    Attributes:
      kind: Static, Dual, Dynamic, Asymmetric or MX.

    Raises:
      TypeError: if it is something else.

    Source: Bengio, Leonard and Courville 2013.

    >>> StraightThrough(Dynamic()).kind.dtype
    dtype('int8')
    """

    kind: Any

    def __post_init__(self):
        _check_one_of(self.kind, (*ONE_OUTPUT, Dual), "kind")


def check_quant(quant, *, optional: bool = True) -> None:
    """A TypeError if `quant` is neither one of the kinds nor (if `optional`) None."""
    if quant is not None or not optional:
        _check_one_of(quant, (*ONE_OUTPUT, Dual, StraightThrough), "quant")


def _check_one_of(value, classes, name) -> None:
    if not isinstance(value, classes):
        listed = ", ".join(c.__name__ for c in classes)
        raise TypeError(f"`{name}` must be one of {listed}, from normlib; got {value!r}.")


def _concrete(value) -> np.ndarray | None:
    """The value of an array that is known now, None of a tracer."""
    return None if isinstance(value, jax.core.Tracer) else np.asarray(value)


def _check_scale(scale, name) -> None:
    if scale is None or not jnp.issubdtype(jnp.result_type(scale), jnp.floating):
        raise TypeError(f"`{name}` must be a float or an array of floats; got {scale!r}.")
    known = _concrete(scale)
    if known is not None:
        known = known.astype(np.float32)
        bad = ~((known >= TINY) & (known <= HUGE))
        if bad.any():
            raise ValueError(
                f"`{name}` must lie in [2**-126, 2**126], so that 1 / {name} is a normal float32; "
                f"got {known[bad].flat[0]}."
            )


def _check_zero_point(zero_point) -> None:
    if not jnp.issubdtype(jnp.result_type(zero_point), jnp.integer):
        raise TypeError(
            f"`zero_point` must be an integer or an array of integers, since it is added after rounding; got "
            f"{jnp.result_type(zero_point)}. Round it first."
        )
    known = _concrete(zero_point)
    if known is not None and (abs(known.astype(np.int64)) > MAX_ZERO_POINT).any():
        raise ValueError(
            f"`zero_point` must lie within 2**24 of 0; got {abs(known.astype(np.int64)).max()} in magnitude."
        )

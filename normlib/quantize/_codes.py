"""Reading codes: values from codes and scales, and two 4-bit codes in a byte."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Shaped, UInt8

from normlib.quantize._mx import unscaled

FOUR_BITS = ("int4", "float4_e2m1fn")


class Quantized(NamedTuple):
    """Codes and what is needed to read them: value = (y - zero_point) * scale; see `dequantize`.

    Attributes:
      y: codes, in the normalised array's shape, one per element.
      scale: the step, float32, broadcastable to y (with groups `[..., D / group]`); of MX the bytes
        `[..., ceil(D / 32)]`, uint8.
      zero_point: int32, broadcastable to y, or None for 0.
    """

    y: Array
    scale: Array
    zero_point: Array | None = None


class DualQuantized(NamedTuple):
    """Two quantisations of one array, each as in `Quantized`.

    Attributes:
      y: codes of the first.
      scale: step of the first.
      zero_point: of the first, or None.
      y2: codes of the second.
      scale2: step of the second.
      zero_point2: of the second, or None.
    """

    y: Array
    scale: Array
    zero_point: Array | None
    y2: Array
    scale2: Array
    zero_point2: Array | None

    @property
    def first(self) -> Quantized:
        return Quantized(self.y, self.scale, self.zero_point)

    @property
    def second(self) -> Quantized:
        return Quantized(self.y2, self.scale2, self.zero_point2)


def dequantize(quantized: Quantized, *, dtype: DTypeLike = jnp.float32) -> Array:
    """(y - zero_point) * scale: the value that codes stand for.

    Args:
      quantized: codes `[..., D]` with their scale and zero point, as a norm returns them or made by hand; a uint8 scale
        holds the bytes of MX blocks.
      dtype: of the result.

    Returns:
      `[..., D]`, computed in float32: the zero point is subtracted as an integer, then one product is rounded (twice
      if `dtype` is narrower).

    Raises:
      ValueError: if the scale has neither a shape that broadcasts to y nor one value per group or block.
      TypeError: for anything but a `Quantized`.

    >>> dequantize(Quantized(jnp.array([1, 3], jnp.int8), jnp.array([0.5]), jnp.array([1]))).tolist()
    [0.0, 1.0]
    """
    if not isinstance(quantized, Quantized):
        raise TypeError(
            f"`quantized` must be a Quantized (of a DualQuantized, its `first` or `second`); got "
            f"{type(quantized).__name__}."
        )
    y, scale, zero_point = (None if t is None else jnp.asarray(t) for t in quantized)
    assert y is not None and scale is not None
    if scale.dtype == jnp.uint8:
        if scale.shape != (*y.shape[:-1], -(-y.shape[-1] // 32)):
            raise ValueError(f"`scale` of MX codes of shape {y.shape} must have one byte per 32; got {scale.shape}.")
        return unscaled(y.astype(jnp.float32), scale).astype(dtype)
    if jnp.issubdtype(y.dtype, jnp.integer):
        y = y.astype(jnp.int32)
        y = y if zero_point is None else y - zero_point
    return (y.astype(jnp.float32) * per_element(scale, y.shape)).astype(dtype)


def per_element(scale: Array, shape: tuple[int, ...]) -> Array:
    """`scale` in a shape that broadcasts to `shape`: one of `[..., D / group]` is repeated.

    Raises:
      ValueError: if it has another shape.
    """
    if scale.ndim <= len(shape) and all(a in (1, b) for a, b in zip(scale.shape[::-1], shape[::-1])):
        return scale
    if scale.ndim == len(shape) and scale.shape[:-1] == shape[:-1] and scale.shape[-1]:
        group, rest = divmod(shape[-1], scale.shape[-1])
        if not rest:
            return jnp.repeat(scale, group, axis=-1)
    raise ValueError(f"`scale` of shape {scale.shape} fits codes of shape {shape} neither per element nor in groups.")


def pack(codes: Shaped[Array, ...]) -> UInt8[Array, ...]:
    """Two 4-bit codes in a byte: element 2 i in the low half, 2 i + 1 in the high half.

    Args:
      codes: `[..., D]` int4 or float4_e2m1fn; an odd D is filled up with a zero code.

    Returns:
      `[..., ceil(D / 2)]` uint8.

    Raises:
      TypeError: for codes of another dtype.
      ValueError: for a scalar.

    >>> pack(jnp.array([1, -1, 7], jnp.int4)).tolist()
    [241, 7]
    """
    codes = jnp.asarray(codes)
    if codes.dtype.name not in FOUR_BITS:
        raise TypeError(f"`codes` must be int4 or float4_e2m1fn; got {codes.dtype}.")
    if not codes.ndim:
        raise ValueError("`codes` must have an axis to pack along; got a scalar.")
    halves = lax.bitcast_convert_type(codes, jnp.uint4).astype(jnp.uint8)
    halves = jnp.pad(halves, [(0, 0)] * (codes.ndim - 1) + [(0, codes.shape[-1] % 2)])
    return halves[..., ::2] | (halves[..., 1::2] << 4)


def unpack(packed: UInt8[Array, ...], dtype: DTypeLike, *, size: int | None = None) -> Array:
    """The codes of `pack`.

    Args:
      packed: `[..., B]` uint8.
      dtype: int4 or float4_e2m1fn.
      size: number of codes along the last axis, 2 B or 2 B - 1; 2 B where None.

    Returns:
      `[..., size]` in `dtype`.

    Raises:
      TypeError: if `packed` is not uint8, or `dtype` is another.
      ValueError: for a `size` that cannot have been packed so.

    >>> unpack(jnp.array([241, 7], jnp.uint8), jnp.int4, size=3).tolist()
    [1, -1, 7]
    """
    packed = jnp.asarray(packed)
    if packed.dtype != jnp.uint8 or not packed.ndim:
        raise TypeError(f"`packed` must be uint8 of rank 1 or more; got {packed.dtype} of shape {packed.shape}.")
    if jnp.dtype(dtype).name not in FOUR_BITS:
        raise TypeError(f"`dtype` must be int4 or float4_e2m1fn; got {jnp.dtype(dtype)}.")
    most = 2 * packed.shape[-1]
    size = most if size is None else size
    if size not in (most, most - 1) or size < 0:
        raise ValueError(f"`size` must be {most} or {most - 1} for {packed.shape[-1]} bytes; got {size}.")
    halves = jnp.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], most)[..., :size]
    return lax.bitcast_convert_type(halves.astype(jnp.uint4), dtype)

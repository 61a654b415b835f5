"""Blocks that share a power of two (OCP Microscaling): exponents are read from the bits of floats.

log2 is wrong for 23 of the 254 powers of two, frexp treats subnormals differently in the two JAX versions, and a cast
to an exponent format rounds.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from normlib.passes.xla import own_copy
from normlib.quantize._formats import Format
from normlib.quantize._ranges import largest_magnitude
from normlib.scope import LOCAL

BLOCK = 32
BIAS = 127
NAN_BYTE = 255
MANTISSA = (1 << 23) - 1


def blocks(t: Array) -> Array:
    """`[..., D]` as `[..., ceil(D / 32), 32]`, the last block filled up with zeros (False)."""
    missing = -t.shape[-1] % BLOCK
    t = jnp.pad(t, [(0, 0)] * (t.ndim - 1) + [(0, missing)])
    return t.reshape(*t.shape[:-1], t.shape[-1] // BLOCK, BLOCK)


def scaled(n: Float[Array, ...], form: Format, scale_alg: int, where: Array | None) -> tuple[Array, Array, Array]:
    """n in units of its block's power of two, that power, and whether the block is finite.

    Args:
      n: `[..., D]` float32.
      form: of the elements.
      scale_alg: 0 or 1; see `MX`.
      where: bool `[..., D]`: entries that exponents are found in; None for all.

    Returns:
      v `[..., D]` float32, 0 in blocks of zeros and in blocks with NaN or infinities; the byte `[..., ceil(D / 32)]`
      uint8; and valid `[..., D]` bool, False in blocks with NaN or infinities.
    """
    size = n.shape[-1]
    grouped = blocks(n)
    largest = largest_magnitude(grouped, (grouped.ndim - 1,), None if where is None else blocks(where), LOCAL)
    bits = lax.bitcast_convert_type(largest, jnp.int32)
    field = bits >> 23
    exponent = field - BIAS - form.max_exponent
    if scale_alg == 1:
        # amax / largest rounded up: one more where amax's mantissa exceeds that of the largest element
        limit = int(np.float32(form.largest).view(np.int32)) & MANTISSA
        exponent = exponent + ((bits & MANTISSA) > limit)
    byte = jnp.clip(exponent, -BIAS, BIAS) + BIAS
    byte = jnp.where(field == 0, 0, jnp.where(field == NAN_BYTE, NAN_BYTE, byte))
    used = (field != 0) & (field != NAN_BYTE)
    # exact: 2**-exponent is a normal float, since no exponent is above 125
    factor = lax.bitcast_convert_type(jnp.where(used, 2 * BIAS - byte, 0) << 23, jnp.float32)
    own, factor, kept = own_copy(grouped, factor, used)
    v = jnp.where(kept, own * factor, 0)

    def flat(t):
        return jnp.broadcast_to(t, grouped.shape).reshape(*n.shape[:-1], grouped.shape[-2] * BLOCK)[..., :size]

    return flat(v), byte[..., 0].astype(jnp.uint8), flat(field != NAN_BYTE)


def unscaled(codes: Float[Array, ...], byte: Int[Array, ...]) -> Float[Array, ...]:
    """codes * 2**(byte - 127), NaN for byte 255; codes `[..., D]` float32, byte `[..., ceil(D / 32)]`.

    In two steps, since 2**-127 alone is subnormal and would be flushed.
    """
    exponent = jnp.repeat(byte.astype(jnp.int32) - BIAS, BLOCK, axis=-1)[..., : codes.shape[-1]]
    half = exponent >> 1
    for part in (half, exponent - half):
        codes = codes * lax.bitcast_convert_type((part + BIAS) << 23, jnp.float32)
    return jnp.where(exponent == NAN_BYTE - BIAS, jnp.nan, codes)

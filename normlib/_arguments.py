"""Checks that the operators share: each returns the argument in its canonical form or says what is wrong with it."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array

from normlib.precision import output_dtype

Axes = int | Iterable[int]


def array(x, name: str = "x") -> Array:
    """`x` as a JAX array of any shape.

    Raises:
      TypeError: if it is not an array of numbers or a number.
    """
    try:
        found = jnp.asarray(x)
    except (TypeError, ValueError) as error:
        raise TypeError(f"`{name}` must be an array; got {type(x).__name__}.") from error
    if not (jnp.issubdtype(found.dtype, jnp.number) or found.dtype == jnp.bool_):
        raise TypeError(f"`{name}` must be an array of numbers; got dtype {found.dtype}.")
    return found


def axes(axis: Axes, ndim: int, name: str = "axis") -> tuple[int, ...]:
    """`axis` as sorted non-negative axes of an array of rank `ndim`.

    Raises:
      TypeError: if it is not an integer or a sequence of integers.
      ValueError: if an axis is out of range or given twice.
    """
    given = tuple(axis) if isinstance(axis, Iterable) else (axis,)
    if not all(isinstance(a, int | np.integer) for a in given):
        raise TypeError(f"`{name}` must be an integer or a tuple of integers; got {axis!r}.")
    for a in given:
        if not -ndim <= a < ndim:
            raise ValueError(f"`{name}` {a} is out of range for x of rank {ndim}.")
    found = sorted(int(a) % ndim for a in given)
    if len(set(found)) != len(found):
        raise ValueError(f"`{name}` {given} names an axis of x (rank {ndim}) twice.")
    return tuple(found)


def epsilon(eps: float, name: str = "eps") -> float:
    """`eps`, if it is a number and not negative.

    Raises:
      ValueError: if it is negative, infinite or NaN.
      TypeError: if it is None or not a number known while tracing; no default is picked silently.
    """
    if isinstance(eps, jax.core.Tracer):
        raise TypeError(
            f"`{name}` must be known while tracing; got a traced {eps.aval}: close over it, or make it static."
        )
    if not is_real(eps):
        raise TypeError(f"`{name}` must be a number; got {eps!r}. See normlib.recommended_eps.")
    if not 0 <= eps < math.inf:
        raise ValueError(f"`{name}` must be >= 0 and finite, since it is added to a variance; got {eps}.")
    return eps


def is_real(value) -> bool:
    """True for a real number of Python, NumPy or JAX (a concrete scalar); bools are none."""
    if isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer):
        return value.ndim == 0 and bool(jnp.issubdtype(value.dtype, jnp.floating))
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def momentum(value, name: str = "momentum"):
    """`value`, if it is a weight of the old value: a number in [0, 1], or an array of it (a schedule's).

    Raises:
      TypeError: if it is neither.
      ValueError: if it lies outside [0, 1].
    """
    if isinstance(value, jax.core.Tracer) and value.ndim == 0:
        return value
    if not is_real(value):
        raise TypeError(f"`{name}` must be a number in [0, 1]; got {value!r}.")
    if not 0 <= value <= 1:
        raise ValueError(
            f"`{name}` is the weight of the old value and must lie in [0, 1]; got {value}. PyTorch's is one minus it."
        )
    return value


def result_dtype(out_dtype: DTypeLike | None, x_dtype, name: str = "out_dtype") -> np.dtype:
    """The dtype of y: `out_dtype`, or that of x (float32 for integers and bools) where it is None.

    Raises:
      TypeError: if it is no dtype.
      ValueError: if it cannot hold y: an integer would truncate it, a real type drop an imaginary part.
    """
    if out_dtype is None:
        return output_dtype(x_dtype)
    try:
        dtype = jnp.dtype(out_dtype)
    except TypeError as error:
        raise TypeError(f"`{name}` must be a dtype; got {out_dtype!r}.") from error
    if not jnp.issubdtype(dtype, jnp.inexact):
        raise ValueError(f"`{name}` must be a floating or complex type; got {dtype}. Integer codes come from `quant`.")
    if jnp.issubdtype(x_dtype, jnp.complexfloating) and not jnp.issubdtype(dtype, jnp.complexfloating):
        raise ValueError(f"`{name}` must be complex, as x is ({jnp.dtype(x_dtype)}); got {dtype}.")
    return dtype


def one_of(value: str, choices: Iterable[str], name: str) -> str:
    """`value`, if it is among `choices`; a ValueError that lists them otherwise."""
    if value not in tuple(choices):
        raise ValueError(f"`{name}` must be one of {', '.join(choices)}; got {value!r}.")
    return value


def parameter(p: Array | None, name: str, x: Array, feature_axes: tuple[int, ...]) -> Array | None:
    """A scale or bias in x's rank: given as a scalar, in the feature shape, or already broadcastable to x.

    Raises:
      ValueError: for any other shape, which would change y's shape or pair the wrong entries.
    """
    if p is None:
        return None
    p = array(p, name)
    if jnp.iscomplexobj(p) and not jnp.iscomplexobj(x):
        raise TypeError(f"`{name}` is {p.dtype}, but x is {x.dtype}: y would lose its imaginary part. Make x complex.")
    features = tuple(x.shape[a] for a in feature_axes)
    if p.shape == features:
        return p.reshape([x.shape[a] if a in feature_axes else 1 for a in range(x.ndim)])
    if p.ndim == 0:
        return p.reshape((1,) * x.ndim)
    if p.ndim == x.ndim and all(s in (1, t) for s, t in zip(p.shape, x.shape)):
        return p
    raise ValueError(
        f"`{name}` must have shape {features} (x's shape {x.shape} along axes {feature_axes}), or x's rank and "
        f"broadcast to it; got {p.shape}."
    )


def feature(p: Array, name: str, x: Array, feature_axes: tuple[int, ...]) -> Array:
    """`p`, of the feature shape, in x's rank.

    Raises:
      ValueError: for any other shape.
    """
    p = array(p, name)
    shape = tuple(x.shape[a] for a in feature_axes)
    if p.shape != shape:
        raise ValueError(f"`{name}` must have shape {shape} (x's shape {x.shape} along {feature_axes}); got {p.shape}.")
    return p.reshape([x.shape[a] if a in feature_axes else 1 for a in range(x.ndim)])


def integer(n, name: str) -> int | None:
    """`n` as a Python integer, NumPy's included; None stays None.

    Raises:
      ValueError: if it is no integer.
    """
    if n is None:
        return None
    try:
        return operator.index(n)
    except TypeError:
        raise ValueError(f"`{name}` must be an integer; got {n!r}.") from None


def mask(where: Array | None, x: Array, name: str = "where") -> Array | None:
    """A mask in x's rank. One of lower rank stands for x's leading axes (rows, positions) or, as in NumPy, its last.

    Raises:
      TypeError: if it is not boolean.
      ValueError: if it fits neither way, or both ways with different meanings.
    """
    if where is None:
        return None
    where = array(where, name)
    if where.dtype != jnp.bool_:
        raise TypeError(f"`{name}` must be boolean; got {where.dtype}. Write `{name} != 0` for a mask of numbers.")
    extra = x.ndim - where.ndim
    if extra < 0:
        raise ValueError(f"`{name}` of shape {where.shape} has a higher rank than x of shape {x.shape}.")
    leading, trailing = where.shape + (1,) * extra, (1,) * extra + where.shape
    fits = [s for s in {leading, trailing} if all(a in (1, b) for a, b in zip(s, x.shape))]
    if not fits:
        raise ValueError(f"`{name}` of shape {where.shape} does not broadcast to x's shape {x.shape}.")
    if len(fits) == 2 and math.prod(where.shape) != 1:
        raise ValueError(
            f"`{name}` of shape {where.shape} fits both the first and the last axes of x, shape {x.shape}; "
            f"give it x's rank: {leading} or {trailing}."
        )
    return where.reshape(fits[0])


def names(axis_name) -> tuple[str, ...]:
    """`axis_name` (None, a name or several) as a tuple.

    Raises:
      TypeError: if it is anything else.
      ValueError: if a name is given twice.
    """
    found = () if axis_name is None else tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
    if not all(isinstance(name, str) for name in found):
        raise TypeError(f"`axis_name` must name a mesh axis, several in a sequence, or be None; got {axis_name!r}.")
    if len(set(found)) != len(found):
        raise ValueError(f"`axis_name` {axis_name} names a mesh axis twice.")
    return found


def groups(axis_index_groups) -> tuple[tuple[int, ...], ...] | None:
    """`axis_index_groups` as a tuple of tuples, or None.

    Raises:
      TypeError: if it is not a sequence of sequences of integers.
    """
    if axis_index_groups is None:
        return None
    try:
        return tuple(tuple(operator.index(i) for i in group) for group in axis_index_groups)
    except TypeError:
        raise TypeError(
            f"`axis_index_groups` must be a sequence of groups of indices, such as [[0, 1], [2, 3]]; "
            f"got {axis_index_groups!r}."
        ) from None


def more_than_one(count: int, on_single: str, what: str) -> None:
    """Check that statistics over `count` entries mean something.

    Raises:
      ValueError: if `count` is 1 and `on_single` is "raise".
    """
    one_of(on_single, ("raise", "zero"), "on_single")
    if count == 1 and on_single == "raise":
        raise ValueError(
            f"{what} has one value per set of statistics: the variance is 0 and y would be the bias, whatever x is. "
            'Use more rows (or share statistics over devices by `axis_name`), or `on_single="zero"` to accept that.'
        )


def same_shape(t: Array, name: str, x: Array, other: str = "x1") -> Array:
    """`t` as an array of the shape of `x`, the argument called `other`; never broadcast.

    Raises:
      ValueError: if it has another shape.
    """
    t = array(t, name)
    if t.shape != x.shape:
        raise ValueError(f"`{name}` must have the shape of `{other}`, {x.shape}; got {t.shape}.")
    return t


def number(value, name: str, *, least: float | None = None) -> float:
    """`value`, if it is a real number, and not below `least` where one is given.

    Raises:
      TypeError: if it is not a number.
      ValueError: if it is NaN or below `least`.
    """
    if not is_real(value):
        raise TypeError(f"`{name}` must be a number; got {value!r}.")
    if value != value or (least is not None and value < least):
        raise ValueError(f"`{name}` must be a number" + ("" if least is None else f" >= {least}") + f"; got {value}.")
    return float(value)


def known_shape(x: Array, backend: str) -> None:
    """A ValueError where x (any shape) has sizes that are not known while tracing: kernels are cut to sizes."""
    if not all(isinstance(n, int) for n in x.shape):
        raise ValueError(
            f"`x` has the symbolic shape {tuple(x.shape)}, but backend {backend!r} cuts its kernels to sizes: export "
            "with sizes, or inside use_backend('xla')."
        )


def split_axis(axis_name):
    """`axis_name`, if there is one.

    Raises:
      ValueError: if it is None or empty.
    """
    if not names(axis_name):
        raise ValueError("`axis_name` must name the mesh axis over which rows are split; got None.")
    return axis_name

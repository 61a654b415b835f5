"""What the table of composites is made of: an operator of several arrays, its bounds, and formulas in float64.

A formula is written once, for NumPy (values) and for JAX in float64 (which differentiates it): `a.np` is either.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from tests import reference


@dataclass(frozen=True)
class Composite:
    """An operator of several arrays.

    Attributes:
      name: of the test.
      call: (**arrays, **options) -> an array or a named tuple; of it the first `outputs` entries are compared.
      formula: (a) -> (outputs, sizes) in float64, a holding the arrays; sizes is what y's rounding is measured at.
      data: shapes of the arrays in x's dtype.
      parameters: shapes of the float32 arrays.
      reduce: axes of x that share statistics: of gradients the size is the largest along them.
      outputs: how many entries of the result are compared.
      rules: that `call` takes.
      keeps: bytes that the backward keeps, as a multiple of all 16-bit data, at most.
      large: shapes of data and parameters for the memory tests, or None for no such test.
      temporaries: bytes of temporaries of forward and backward together, as a multiple of one data array, at most.
      slack: of the bound on roundings in float32, as a multiple.
      mean: of the data.
      dtypes: in which it is compared with the formula.
      own_rule: it has a derivative rule of its own beside the engine's: then every transformation is tested.
    """

    name: str
    call: Callable[..., Any]
    formula: Callable[[Any], Any]
    data: dict[str, tuple[int, ...]]
    parameters: dict[str, tuple[int, ...]] = field(default_factory=dict)
    reduce: tuple[int, ...] = (-1,)
    outputs: int = 1
    rules: tuple[str, ...] = ("reverse", "both", "autodiff")
    keeps: float = 1.1
    large: dict[str, tuple[int, ...]] | None = None
    temporaries: float = 0.1
    slack: float = 1.0
    mean: float = 1.0
    dtypes: tuple[str, ...] = ("f32", "bf16", "f16")
    own_rule: bool = False

    def run(self, arrays, **options):
        """The compared outputs, as a tuple."""
        out = self.call(**arrays, **options)
        return tuple(out)[: self.outputs] if isinstance(out, tuple) else (out,)

    def inputs(self, dtype=jnp.float32, *, seed=0, shapes=None, mean=None):
        """Random arrays: data in `dtype`, parameters in float32."""
        rng = np.random.default_rng([seed, len(self.name)])
        shapes = shapes or self.data | self.parameters
        mean = self.mean if mean is None else mean
        draw = lambda name, shape: jnp.asarray(rng.normal(size=shape), jnp.float32) + (name in self.data) * mean  # noqa: E731
        return {n: draw(n, s).astype(dtype if n in self.data else jnp.float32) for n, s in shapes.items()}

    def expected(self, arrays, cotangents=None):
        """((outputs, sizes) from NumPy, gradients by name from JAX in float64)."""
        dtype = np.asarray(next(arrays[n] for n in self.data)).dtype
        wide = {n: np.asarray(t).astype(np.float64) for n, t in arrays.items()}
        values, sizes = self.formula(SimpleNamespace(np=np, dtype=dtype, **wide))
        if cotangents is None:
            return (values, sizes), None
        with jax.enable_x64(True):
            cts = tuple(jnp.asarray(np.asarray(c).astype(np.float64)) for c in cotangents)
            given = {n: jnp.asarray(t) for n, t in wide.items()}
            grads = jax.tree.map(np.asarray, _gradient(self.formula, dtype)(given, cts))
        return (values, sizes), grads


@functools.cache
def _gradient(formula, dtype):
    """The compiled gradient of a formula for cotangents, shared by all tests of an operator."""

    def total(given, cts):
        outputs = formula(SimpleNamespace(np=jnp, dtype=dtype, **given))[0]
        return sum((o * c).sum() for o, c in zip(outputs, cts))

    return jax.jit(jax.grad(total))


def check_rounded_once(actual, expected, size, dtype, *, slack=1.0, what="y"):
    """|actual - expected| is half an ulp of the result's dtype, and a few of float32's at `size`."""
    actual = reference.f64(actual)
    assert actual.shape == expected.shape, (what, actual.shape, expected.shape)
    if not actual.size:
        return
    bound = 0.502 * reference.ulp(abs(expected), dtype) + 12 * slack * reference.EPS32 * size
    tiny = float(ml_dtypes.finfo(dtype).smallest_normal)
    error = np.where(abs(expected) < tiny, 0, abs(actual - expected))
    assert np.isfinite(actual).all(), f"{what} is not finite"
    worst = (error / np.broadcast_to(bound, error.shape)).max()
    assert worst <= 1, f"{what}: {worst:.2f} times the bound"


def moments(a, x, axes, *, groups=None):
    """Mean and biased variance over `axes`, at x's shape; with `groups` of the last axis too."""
    if groups is None:
        mean = x.mean(axes, keepdims=True)
        return mean, ((x - mean) ** 2).mean(axes, keepdims=True)
    split = x.reshape(*x.shape[:-1], groups, -1)
    axes = (*axes, x.ndim)
    mean = split.mean(axes, keepdims=True)
    var = ((split - mean) ** 2).mean(axes, keepdims=True)
    at_x = lambda t: a.np.broadcast_to(t, split.shape).reshape(x.shape)  # noqa: E731
    return at_x(mean), at_x(var)


def normal(a, x, axes, eps, scale=1.0, bias=0.0, *, centered=True, groups=None):
    """(y, size): the textbook norm and the size at which its roundings are measured."""
    mean, var = moments(a, x, axes, groups=groups)
    if not centered:
        mean, var = 0.0, (x**2).mean(axes, keepdims=True)
    y = (x - mean) / a.np.sqrt(var + eps) * scale
    size = a.np.maximum(abs(y), abs(y + bias)) + abs(a.np.asarray(bias)) + abs(a.np.asarray(scale))
    return y + bias, size


def rounded(a, s):
    """s in the data's dtype, its derivative that of s: through float32, as the sum is formed."""
    if a.dtype == np.float64:
        return s
    if a.np is np:
        return s.astype(np.float32).astype(a.dtype).astype(np.float64)
    low = jnp.finfo(a.dtype)  # not by casts: XLA on GPU takes such a pair away
    close = jax.lax.reduce_precision(s.astype(jnp.float32), low.nexp, low.nmant)
    return s + jax.lax.stop_gradient(close.astype(jnp.float64) - s)

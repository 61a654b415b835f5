"""Passes: how one sweep over memory is done, behind one small protocol.

The engine asks for five functions and never knows which backend answers; a backend is one module here.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any, Protocol

import jax
from jax.typing import DTypeLike
from jaxtyping import Array

from normlib.moments import Moments
from normlib.passes import xla
from normlib.passes.npu import NpuPass
from normlib.passes.pallas import PallasPass

# What makes a pass from its options. A pass is hashable: it is part of the static arguments of the derivative rules.
BACKENDS: dict[str, Callable[..., Any]] = {"xla": lambda: xla, "pallas": PallasPass, "npu": NpuPass}

# A user context is part of jit's cache key and is seen in the backward pass; a plain global would be neither.
_backend = jax.make_user_context(None)


class Pass(Protocol):
    """What a backend provides. Reduced axes are kept with size 1; `where` broadcasts to x; k, mean, low, rstd and the
    coefficients broadcast to x. With mean None x is not centred."""

    @staticmethod
    def moments(x: Array, *, axes: tuple[int, ...], where: Array | None, batch_invariant: bool) -> Moments:
        """Accurate moments of x over `axes`."""

    @staticmethod
    def sums(
        x: Array, k: Array | None, *, axes: tuple[int, ...], where: Array | None, batch_invariant: bool
    ) -> tuple[Array, Array]:
        """sum(x - k) and sum(|x - k|**2) over `axes`; k None is 0."""

    @staticmethod
    def apply(
        x: Array, mean: Array | None, low: Array | None, rstd: Array, scale: Array | None, bias: Array | None, *,
        where: Array | None, dtype: DTypeLike | None, batch_invariant: bool,
    ) -> Array:  # fmt: skip
        """((x - mean - low) * rstd * scale + bias) in `dtype` (x's if None), rounded once; with a mask, bias where rstd
        is 0."""

    @staticmethod
    def grad_sums(
        x: Array, dy: Array, mean: Array | None, low: Array | None, rstd: Array, weight: Array | None, *,
        axes: tuple[int, ...], where: Array | None,
    ) -> tuple[Array, Array]:  # fmt: skip
        """sum(dy * weight) and sum(dy * weight * xhat) over `axes`, xhat = (x - mean - low) * rstd."""

    @staticmethod
    def grad_apply(
        x: Array, dy: Array, mean: Array | None, low: Array | None, rstd: Array, weight: Array | None, c1: Array,
        c0: Array | None, *, where: Array | None,
    ) -> Array:  # fmt: skip
        """dx = (dy * weight - [where] (c1 * (x - mean - low) + c0)) * rstd in x's dtype, rounded once."""


@contextlib.contextmanager
def use_backend(name: str, **options: Any):
    """Run norms traced inside on the backend `name`; already compiled functions are compiled anew for it.

    Args:
      name: "xla" (plain JAX), "pallas" (tile kernels on a GPU or TPU, or interpreted) or "npu" (the same kernels on a
        simulated AI Core).
      options: of the pass: `platform` and `interpret` of `normlib.passes.pallas.PallasPass`; `chip`, `precision`,
        `order` and `tune` of `normlib.passes.npu.NpuPass`. A thread started inside runs on "xla" unless it asks too.

    Raises:
      ValueError: if there is no such backend, or an option has no such value.
      TypeError: for an option that the backend does not have.

    >>> with use_backend("npu", chip="910b2", precision="fp16_fp32acc"):
    ...     current_backend().policy.data
    'fp16'
    """
    with _backend(checked(name, **options)):
        yield


def checked(backend: Any, **options: Any) -> Any:
    """The pass of that name with these options, or a pass as it is; a ValueError that lists the names otherwise."""
    if not isinstance(backend, str):
        if backend in BACKENDS.values() or not hasattr(backend, "grad_apply"):
            raise ValueError(f"`backend` must be a pass or one of {', '.join(BACKENDS)}; got {backend!r}.")
        if options:
            raise TypeError(
                f"a pass holds its options already, but `{next(iter(options))}` was given beside {backend!r}."
            )
        return backend
    if backend not in BACKENDS:
        raise ValueError(f"`backend` must be one of {', '.join(BACKENDS)}; got {backend!r}.")
    has = list(inspect.signature(BACKENDS[backend]).parameters)
    for name in options:
        if name not in has:
            raise TypeError(f"backend {backend!r} has no option `{name}`; it has {', '.join(has) or 'none'}.")
    return BACKENDS[backend](**options)


def current_backend() -> Any:
    """The pass that a norm traced here runs on.

    >>> current_backend().__name__
    'normlib.passes.xla'
    """
    return xla if _backend.value is None else _backend.value

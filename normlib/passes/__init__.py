"""Passes: how one sweep over memory is done, behind one small protocol.

The engine asks for five functions and never knows which backend answers; a backend is one module here.
"""

from __future__ import annotations

import contextlib
from types import ModuleType
from typing import Protocol

import jax
from jax.typing import DTypeLike
from jaxtyping import Array

from normlib.moments import Moments
from normlib.passes import xla

BACKENDS: dict[str, ModuleType] = {"xla": xla}
DEFAULT = "xla"

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
def use_backend(name: str):
    """Run norms traced inside on the backend `name`; already compiled functions are compiled anew for it.

    Args:
      name: one of `normlib.passes.BACKENDS`.

    Raises:
      ValueError: if there is no such backend.

    >>> with use_backend("xla"):
    ...     pass
    """
    with _backend(checked(name)):
        yield


def checked(name: str) -> str:
    """`name`, if there is a backend of that name; a ValueError that lists them otherwise."""
    if name not in BACKENDS:
        raise ValueError(f"`backend` must be one of {', '.join(BACKENDS)}; got {name!r}.")
    return name


def current_backend() -> str:
    """The backend that a norm traced here runs on.

    >>> current_backend()
    'xla'
    """
    return _backend.value or DEFAULT

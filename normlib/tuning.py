"""Scales and biases of norms in training: which leaves they are, training them alone, and how scales start."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from normlib._tree import names_of

AFFINE = ("scale", "bias")


def affine_mask(params: Any) -> Any:
    """True at the scale and bias of every norm, False at every other leaf.

    A norm is a node whose leaves are all called `scale` or `bias`; a dense layer or convolution has a kernel beside
    its bias and does not count. Weight decay that spares norms: optax.adamw(mask=the negated tree).

    Args:
      params: parameters of a linen model (nested dicts), or the `nnx.Param` state of an nnx model.

    Returns:
      A tree of bools in the structure of `params`, a mask for optax.

    >>> affine_mask({"fc": {"kernel": 0.0, "bias": 0.0}, "bn": {"scale": 0.0, "bias": 0.0}})
    {'bn': {'bias': True, 'scale': True}, 'fc': {'bias': False, 'kernel': False}}
    """
    paths = [names_of(path) for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
    beside: dict[tuple[str, ...], set[str]] = {}
    for path in paths:
        for depth in range(len(path)):  # a node above others has their names among its own, and so is no norm
            beside.setdefault(path[:depth], set()).add(path[depth])
    flags = [bool(path) and beside[path[:-1]] <= set(AFFINE) for path in paths]
    return jax.tree.unflatten(jax.tree.structure(params), flags)


def train_affine_only(optimizer: Any) -> Any:
    """An optimiser that trains the scale and bias of norms and leaves every other parameter as it is (TENT).

    optax.masked alone would not do: it passes the other gradients on, unscaled. Here they become zero updates, and
    the optimiser keeps no state for them.

    Args:
      optimizer: an optax transformation for the scales and biases.

    Returns:
      An optax transformation for the whole tree of parameters, linen's or nnx's.

    Raises:
      ValueError: when it is initialised with parameters that hold no norm's scale or bias.

    Source: Wang et al. 2021, "Tent: fully test-time adaptation by entropy minimization".

    >>> import optax
    >>> params = {"fc": {"kernel": jnp.ones(1)}, "bn": {"scale": jnp.ones(1)}}
    >>> tx = train_affine_only(optax.sgd(1.0))
    >>> updates, _ = tx.update(params, tx.init(params), params)
    >>> updates["fc"]["kernel"].tolist(), updates["bn"]["scale"].tolist()
    ([0.0], [-1.0])
    """
    # imported where needed: nothing else here uses it
    import optax

    def labels(params):
        mask = affine_mask(params)
        if not any(jax.tree.leaves(mask)):
            raise ValueError(
                "`params` holds no norm's scale or bias: no node has leaves of these names alone. Is it the tree of "
                "parameters, without batch statistics?"
            )
        return jax.tree.map(lambda trained: "train" if trained else "keep", mask)

    return optax.multi_transform({"train": optimizer, "keep": optax.set_to_zero()}, labels)


def residual_scale_init(num_blocks: int, *, zero: bool = False) -> Callable[..., Array]:
    """Initialiser for the scale of the last norm in each residual branch.

        scale = 1 / sqrt(num_blocks), kept within 0.1 and 0.3;   0 with `zero`

    With unit-variance branches L of them add L * scale**2 to the variance of the sum: about 1 in all between 11 and
    100 blocks. Zero starts every block as the identity.

    Args:
      num_blocks: residual blocks in the network, at least 1.
      zero: start from 0.

    Returns:
      A function (key, shape, dtype) -> array, for `scale_init` (with scale_offset=1 subtract 1 from its result).

    Raises:
      ValueError: if `num_blocks` is not a positive integer.

    Source: zero: Goyal et al. 2017, "Accurate, large minibatch SGD", section 5.1; 0.1 to 0.3: the advice for deep
    residual nets collected for this project, here given a rule by depth.

    >>> residual_scale_init(25)(jax.random.key(0), (2,))
    Array([0.2, 0.2], dtype=float32)
    """
    if not isinstance(num_blocks, int) or num_blocks < 1:
        raise ValueError(f"`num_blocks` must be a positive integer; got {num_blocks!r}.")
    value = 0.0 if zero else min(max(1 / math.sqrt(num_blocks), 0.1), 0.3)

    def init(key: Any, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> Array:
        return jnp.full(shape, value, dtype)

    return init

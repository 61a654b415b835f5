"""A pass made of tile kernels: what the `pallas` and `npu` passes share.

Every function of the protocol runs one kernel (two where partial sums are merged). Their derivatives are those of the
XLA pass, so that every rule and any order of differentiation works; the first backward of the rule "reverse" runs
kernels. What kernels do not compute (complex numbers, empty arrays) runs on the XLA pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from normlib.kernels.affine import affine_tile, centred, elementwise, finite, grad_tile
from normlib.kernels.channel_parts import merged_moments
from normlib.kernels.column_moments import moments as kernel_moments
from normlib.kernels.machine import Machine
from normlib.kernels.sums import sums as kernel_sums
from normlib.kernels.tile import activated
from normlib.moments import Moments, count_entries
from normlib.passes import channels, coded, whole, xla
from normlib.passes.placement import Split
from normlib.precision import wide


@dataclass(frozen=True)
class TilePass:
    """The protocol of `normlib.passes.Pass` on tile kernels; a subclass says how a kernel call is run."""

    @property
    def machine(self) -> Machine:
        """Where kernels run."""
        raise NotImplementedError

    def run(
        self, kernel: Callable[..., Any], arrays: Sequence[Array], statistics: Sequence[int], split: Split | None
    ) -> Any:
        """`kernel(*arrays)`; `statistics` are the positions of arrays that hold statistics."""
        raise NotImplementedError

    def computes(self, x: Array) -> bool:
        """Whether kernels compute arrays like x."""
        return x.size > 0 and jnp.issubdtype(x.dtype, jnp.floating)

    def sums(self, x, k, *, axes, where, batch_invariant=False):
        """See `normlib.passes.Pass.sums`."""
        if not self.computes(x) or not axes:
            return xla.sums(x, k, axes=axes, where=where, batch_invariant=batch_invariant)

        def terms(x, k, where):
            d = x if k is None else x - k
            d = d if where is None else jnp.where(where, d, 0.0)
            return d, d * d

        def kernel(x, k, where):
            return kernel_sums(terms, [x, k, where], axes=axes, number=2, name="sums", machine=self.machine)

        def formula(x, k, where):
            return xla.sums(x, k, axes=axes, where=where)

        return self.call(kernel, formula, [x, k, where], statistics=(1,), split=Split(added=axes))

    def moments(self, x, *, axes, where, batch_invariant=False):
        """See `normlib.passes.Pass.moments`."""
        if where is not None or not self.computes(x) or not axes:
            return xla.moments(x, axes=axes, where=where, batch_invariant=batch_invariant, sums=self.sums)

        def kernel(x):
            return kernel_moments(x, axes=axes, machine=self.machine)

        def formula(x):
            return tuple(xla.moments(x, axes=axes, where=None)[1:])

        split = Split(added=axes, merge=functools.partial(merged_moments, axes))
        mean, low, m2 = self.call(kernel, formula, [x], statistics=(), split=split)
        return Moments(jnp.broadcast_to(count_entries(x.shape, axes, None), m2.shape), mean, low, m2)

    def apply(self, x, mean, low, rstd, scale, bias, *, where=None, dtype=None, batch_invariant=False):
        """See `normlib.passes.Pass.apply`."""
        dtype = x.dtype if dtype is None else dtype
        if not self.computes(x):
            return xla.apply(x, mean, low, rstd, scale, bias, where=where, dtype=dtype)

        def kernel(*operands):
            return elementwise(affine_tile, operands, name="affine", dtype=dtype, machine=self.machine)

        def formula(*operands):
            return xla.apply(*operands[:-1], where=operands[-1], dtype=dtype)

        operands = [x, mean, low, rstd, scale, bias, where]
        return self.call(kernel, formula, operands, statistics=(1, 2, 3), split=Split())

    def grad_sums(self, x, dy, mean, low, rstd, weight, *, axes, where):
        """See `normlib.passes.Pass.grad_sums`."""
        if not self.computes(x) or not axes:
            return xla.grad_sums(x, dy, mean, low, rstd, weight, axes=axes, where=where)

        def terms(x, dy, mean, low, rstd, weight, where):
            g = dy if weight is None else dy * weight
            xc = centred(x, mean, low)
            if where is not None:
                xc = jnp.where((where | (g != 0)) & (rstd != 0), xc, 0.0)
            return g, g * (xc * rstd)

        def kernel(*operands):
            return kernel_sums(terms, operands, axes=axes, number=2, name="grad_sums", machine=self.machine)

        def formula(*operands):
            return xla.grad_sums(*operands[:-1], axes=axes, where=operands[-1])

        operands = [x, dy, mean, low, rstd, weight, where]
        return self.call(kernel, formula, operands, statistics=(2, 3, 4), split=Split(added=axes))

    def grad_apply(self, x, dy, mean, low, rstd, weight, c1, c0, *, where):
        """See `normlib.passes.Pass.grad_apply`."""
        if not self.computes(x):
            return xla.grad_apply(x, dy, mean, low, rstd, weight, c1, c0, where=where)

        def kernel(*operands):
            return elementwise(grad_tile, operands, name="grad_affine", dtype=x.dtype, machine=self.machine)

        def formula(*operands):
            return xla.grad_apply(*operands[:-1], where=operands[-1])

        operands = [x, dy, mean, low, rstd, weight, c1, c0, where]
        return self.call(kernel, formula, operands, statistics=(2, 3, 4, 6, 7), split=Split())

    # What stands behind a norm, in the sweep of its affine map

    def apply_behind(self, x, mean, low, rstd, scale, bias, behind, where, *, activation, dtype):
        """activation(apply(...) + behind), rounded once."""

        def tile(*operands):
            act = functools.partial(activated, activation, machine=self.machine)
            return _behind(act, affine_tile, *operands)

        def kernel(*operands):
            operands = _affine_order(operands)
            return elementwise(
                tile, operands, name="affine_act", dtype=dtype, machine=self.machine, temporary=20
            )  # fmt: skip

        def formula(*operands):
            return _behind(activation, xla.mapped, *_affine_order(operands)).astype(dtype)

        if not self.computes(x):
            return formula(x, mean, low, rstd, scale, bias, behind, where)
        operands = [x, mean, low, rstd, scale, bias, behind, where]
        return self.call(kernel, formula, operands, statistics=(1, 2, 3), split=Split())

    def pull_behind(self, x, mean, low, rstd, scale, bias, behind, where, dy, *, activation, dtype):
        """The cotangent of apply(...) + behind from dy, that of its activation."""

        def pulled(mapped, x, mean, low, rstd, scale, bias, where, behind, dy):
            z = mapped(x, mean, low, rstd, scale, bias, where)
            z = z if behind is None else z + wide(behind)
            z = z if where is None else jnp.where(where | finite(z), z, 0.0)  # 0 * NaN behind the mask
            return activation.pull(wide(dy), z, jnp.ones((), dtype))

        def kernel(*operands):
            body = functools.partial(pulled, affine_tile)
            operands = _affine_order(operands)
            return elementwise(body, operands, name="act_grad", dtype=dtype, machine=self.machine, temporary=24)

        def formula(*operands):
            return pulled(xla.mapped, *_affine_order(operands)).astype(dtype)

        if not self.computes(x):
            return formula(x, mean, low, rstd, scale, bias, behind, where, dy)
        operands = [x, mean, low, rstd, scale, bias, behind, where, dy]
        return self.call(kernel, formula, operands, statistics=(1, 2, 3), split=Split())

    # The whole forward or backward in one kernel, of rows or of whole channels, or None: where statistics are of one
    # device

    def forward(self, terms, scale, bias, where, behind=None, *, batch_invariant=False, **options):
        """See `normlib.passes.whole.forward` and `normlib.passes.channels.forward`."""
        found = whole.forward(self, terms, scale, bias, where, behind, **options)
        if found is None and not batch_invariant:  # tiles of whole channels depend on how many samples there are
            found = channels.forward(self, terms, scale, bias, where, behind, **options)
        return found

    def backward(self, terms, dy, mean, low, rstd, scale=None, bias=None, behind=None, extra=None, **options):
        """See `normlib.passes.whole.backward` and `normlib.passes.channels.backward`."""
        given = terms, dy, mean, low, rstd, scale, bias, behind, extra
        found = whole.backward(self, *given, **options)
        return channels.backward(self, *given, **options) if found is None else found

    def coded(self, terms, scale, bias, coders, **options):
        """See `normlib.passes.coded.coded`."""
        return coded.coded(self, terms, scale, bias, coders, **options)

    def call(self, kernel, formula, operands, *, statistics: tuple[int, ...], split: Split | None = None):
        """Run `kernel(*operands)`, differentiated as `formula(*operands)`; operands may be None.

        The kernel asks its operands for shapes: it may be given a part of them (see `split`).
        """
        present = [i for i, t in enumerate(operands) if t is not None]

        def full(arrays):
            filled = [None] * len(operands)
            for i, t in zip(present, arrays):
                filled[i] = t
            return filled

        def on_machine(*arrays):
            return kernel(*full(arrays))

        if split is not None and (across := split.across) is not None:
            split = replace(split, across=lambda arrays, names: across(full(arrays), names))

        held = [place for place, i in enumerate(present) if i in statistics]

        @jax.custom_jvp
        def call(*arrays):
            return self.run(on_machine, arrays, held, split)

        @call.defjvp
        def _(primals, tangents):
            with xla.unstaged():
                _, dots = jax.jvp(lambda *arrays: formula(*full(arrays)), primals, tangents)
            return call(*primals), dots

        return call(*(operands[i] for i in present))


def _affine_order(operands):
    """x, mean, low, rstd, scale, bias, behind, where, ... with the mask before what stands behind."""
    *affine, behind, where = operands[:8]
    return [*affine, where, behind, *operands[8:]]


def _behind(activation, mapped, x, mean, low, rstd, scale, bias, where, behind):
    z = mapped(x, mean, low, rstd, scale, bias, where)
    z = z if behind is None else z + wide(behind)
    return z if activation is None else activation(z)

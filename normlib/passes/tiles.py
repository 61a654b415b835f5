"""A pass made of tile kernels: what the `pallas` and `npu` passes share.

Every function of the protocol runs one kernel (two where partial sums are merged). Their derivatives are those of the
XLA pass, so that every rule and any order of differentiation works; the first backward of the rule "reverse" runs
kernels. What kernels do not compute (complex numbers, empty arrays) runs on the XLA pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from normlib.kernels.affine import affine_tile, centred, elementwise, grad_tile
from normlib.kernels.machine import Machine
from normlib.kernels.rows import row_norm
from normlib.kernels.rows_grad import row_norm_grad
from normlib.kernels.sums import sums as kernel_sums
from normlib.kernels.view import rows_of
from normlib.moments import Moments, count_entries
from normlib.passes import xla
from normlib.passes.placement import Split


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

        return self._call(kernel, formula, [x, k, where], statistics=(1,), split=Split(added=axes))

    def moments(self, x, *, axes, where, batch_invariant=False):
        """See `normlib.passes.Pass.moments`."""
        return xla.moments(x, axes=axes, where=where, batch_invariant=batch_invariant, sums=self.sums)

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
        return self._call(kernel, formula, operands, statistics=(1, 2, 3), split=Split())

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
        return self._call(kernel, formula, operands, statistics=(2, 3, 4), split=Split(added=axes))

    def grad_apply(self, x, dy, mean, low, rstd, weight, c1, c0, *, where):
        """See `normlib.passes.Pass.grad_apply`."""
        if not self.computes(x):
            return xla.grad_apply(x, dy, mean, low, rstd, weight, c1, c0, where=where)

        def kernel(*operands):
            return elementwise(grad_tile, operands, name="grad_affine", dtype=x.dtype, machine=self.machine)

        def formula(*operands):
            return xla.grad_apply(*operands[:-1], where=operands[-1])

        operands = [x, dy, mean, low, rstd, weight, c1, c0, where]
        return self._call(kernel, formula, operands, statistics=(2, 3, 4, 6, 7), split=Split())

    # The whole forward or backward in one kernel, where statistics are of one device and of rows

    def forward(self, x, scale, bias, *, axes, eps, centered, where, dtype):
        """(y, moments, rstd) in one kernel, or None where this takes more than one."""
        if not axes or not self.computes(x) or rows_of(x.shape, axes) is None:
            return None
        dtype = x.dtype if dtype is None else jnp.dtype(dtype)

        def kernel(x, scale, bias, where, *dynamic):
            view = _rows(axes, x, scale, bias, where)
            out = row_norm(
                [x], scale, bias, where, view=view, eps=dynamic[0] if dynamic else eps, machine=self.machine,
                centered=centered, dtype=dtype,
            )  # fmt: skip
            columns = [out.m2, out.rstd, *((out.mean, out.low) if centered else ())]
            return view.back(out.y), *(view.back(t) for t in columns)

        def formula(x, scale, bias, where, *dynamic):
            if centered:
                own = xla.moments(x, axes=axes, where=where)
            else:
                own = _own(x, axes, where, None, None, xla.sums(x, None, axes=axes, where=where)[1])
            rstd = own.rstd(dynamic[0] if dynamic else eps)
            mean, low = (own.mean, own.low) if centered else (None, None)
            y = xla.apply(x, mean, low, rstd, scale, bias, where=where, dtype=dtype)
            return y, own.m2, rstd, *((mean, low) if centered else ())

        dynamic = [] if isinstance(eps, int | float) else [jnp.reshape(eps, jnp.shape(eps) or (1,) * x.ndim)]
        operands = [x, scale, bias, where, *dynamic]
        y, m2, rstd, *centre = self._call(kernel, formula, operands, statistics=(4,), split=Split(whole=axes))
        mean, low = centre or (None, None)
        return y, _own(x, axes, where, mean, low, m2), rstd

    def backward(self, x, dy, mean, low, rstd, weight, *, axes):
        """dx in one kernel, or None where this takes more than one."""
        if not axes or not self.computes(x) or rows_of(x.shape, axes) is None:
            return None

        def kernel(x, dy, mean, low, rstd, weight):
            view = _rows(axes, x, rstd, weight)
            return view.back(row_norm_grad(x, dy, mean, low, rstd, weight, view=view, machine=self.machine))

        def formula(x, dy, mean, low, rstd, weight):
            n = math.prod(x.shape[a] for a in axes)
            s0, s1 = xla.grad_sums(x, dy, mean, low, rstd, weight, axes=axes, where=None)
            c0 = None if mean is None else s0 / n
            return xla.grad_apply(x, dy, mean, low, rstd, weight, rstd * (s1 / n), c0, where=None)

        operands = [x, dy, mean, low, rstd, weight]
        return self._call(kernel, formula, operands, statistics=(2, 3, 4), split=Split(whole=axes))

    def _call(self, kernel, formula, operands, *, statistics: tuple[int, ...], split: Split | None = None):
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


def _rows(axes, x, *operands):
    """The rows of x as kernels see them beside operands that broadcast to it."""
    view = rows_of(x.shape, axes, [x.shape, *(t.shape for t in operands if t is not None)])
    assert view is not None  # rows of x alone have been seen so
    return view


def _own(x, axes, where, mean, low, m2) -> Moments:
    count = jnp.broadcast_to(count_entries(x.shape, axes, where), m2.shape)
    return Moments(count, jnp.zeros_like(m2) if mean is None else mean, jnp.zeros_like(m2) if low is None else low, m2)

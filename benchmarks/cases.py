"""Every kernel in every layout: what is lowered and compiled without a device, and checked and timed on one.

A case is a kernel with its tiling, operand shapes and dtypes, and what float64 NumPy says it gives. `small` shapes take
each path of a kernel once; `cases(large=True)` are those worth timing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from normlib.kernels.affine import affine_tile, elementwise, grad_tile
from normlib.kernels.channel_grad import channel_norm_grad
from normlib.kernels.channel_norm import channel_norm
from normlib.kernels.channel_sets import sets_of
from normlib.kernels.column_moments import moments
from normlib.kernels.machine import Machine
from normlib.kernels.rows import row_norm
from normlib.kernels.rows_grad import Given, row_norm_grad
from normlib.kernels.sums import sums
from normlib.kernels.view import rows_of

EPS = 1e-5
DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}


@dataclass(frozen=True)
class Case:
    """A kernel call.

    Attributes:
      name: kernel, layout, dtype.
      call: (machine, *arrays) -> tuple of arrays.
      shapes: of the operands, with their dtypes ("mask" for bool).
      expected: (*arrays in float64) -> the tuple that `call` gives, in float64.
      sums: results are sums of so many terms; 1 for what is rounded once.
      base: (*arrays) -> the same in plain JAX, for comparison of speed.
      size: (*arrays in float64) -> what roundings are measured at, where results are differences of larger numbers.
    """

    name: str
    call: Callable[..., tuple[Any, ...]]
    shapes: tuple[tuple[tuple[int, ...], Any], ...]
    expected: Callable[..., tuple[np.ndarray, ...]]
    sums: int = 1
    base: Callable[..., Any] | None = None
    size: Callable[..., float] | None = None

    def structs(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the operands."""
        return [jax.ShapeDtypeStruct(s, jnp.bool_ if d == "mask" else d) for s, d in self.shapes]

    def arrays(self, seed: int = 0) -> list[np.ndarray]:
        """Operands: normal numbers about 1, masks that leave 70 %."""
        rng = np.random.default_rng(seed)
        return [
            rng.random(s) < 0.7 if d == "mask" else (rng.normal(size=s) + 1).astype(np.float32).astype(d)
            for s, d in self.shapes
        ]

    def on_device(self, seed: int = 0) -> list[jax.Array]:
        """Such operands, made on the default device."""
        keys = jax.random.split(jax.random.key(seed), len(self.shapes))
        return [
            jax.random.bernoulli(key, 0.7, s) if d == "mask" else (jax.random.normal(key, s) + 1).astype(d)
            for key, (s, d) in zip(keys, self.shapes)
        ]

    def error(self, arrays: list[np.ndarray], results: Any) -> float:
        """The largest error as a multiple of its bound: 8 ulp at the largest entry, or that of a sum of n terms."""
        wide = [a if a.dtype == bool else a.astype(np.float64) for a in arrays]
        wanted, least = self.expected(*wide), self.size(*wide) if self.size else 1e-30
        worst = 0.0
        for got, want in zip(results, wanted, strict=True):
            got = np.asarray(got)
            size = np.max(abs(want), initial=least)
            bound = 8 * float(ml_dtypes.finfo(got.dtype).eps) * size
            if self.sums > 1:
                bound = 2.0**-24 * (16 * np.sqrt(self.sums) * 8 + 4 * size)  # terms here are below 8 in size
            apart = abs(got.astype(np.float64).reshape(want.shape) - want)
            worst = max(worst, float(np.max(apart, initial=0.0)) / bound if np.isfinite(apart).all() else np.inf)
        return float(worst)


def _stats(x, where=None, centered=True):
    w = np.ones(x.shape) if where is None else np.broadcast_to(where, x.shape).astype(np.float64)
    n = np.maximum(w.sum(-1, keepdims=True), 1)
    mean = (x * w).sum(-1, keepdims=True) / n if centered else 0.0
    return mean, 1 / np.sqrt((((x - mean) * w) ** 2).sum(-1, keepdims=True) / n + EPS)


def row_case(name, shape, dtype, *, scale=None, bias=None, mask=None, terms=1, centered=True, **tiling) -> Case:
    """A norm of the last axis; `scale`, `bias`, `mask` are shapes."""
    given = [(s, t) for s, t in ((scale, jnp.float32), (bias, jnp.float32), (mask, "mask")) if s is not None]

    def split(arrays):
        rest = list(arrays[terms:])
        return arrays[:terms], [None if s is None else rest.pop(0) for s in (scale, bias, mask)]

    def call(machine: Machine, *arrays):
        xs, (g, b, where) = split(arrays)
        view = rows_of(shape, (len(shape) - 1,), [t.shape for t in arrays])
        assert view is not None
        out = row_norm(xs, g, b, where, view=view, eps=EPS, machine=machine, centered=centered, **tiling)
        return out.y, out.rstd

    def expected(*arrays):
        xs, (g, b, where) = split(arrays)
        s = sum(xs)
        mean, rstd = _stats(s, where, centered)
        y = (s - mean) * rstd * (1 if g is None else g) + (0 if b is None else b)
        return y, rstd

    def base(*arrays):
        xs, (g, b, _) = split(arrays)
        s = sum(t.astype(jnp.float32) for t in xs)
        mean = s.mean(-1, keepdims=True) if centered else 0.0
        y = (s - mean) * jax.lax.rsqrt(jnp.square(s - mean).mean(-1, keepdims=True) + EPS)
        return (y * (1 if g is None else g) + (0 if b is None else b)).astype(dtype)

    return Case(name, call, ((shape, dtype),) * terms + tuple(given), expected, base=base)


def grad_case(name, shape, dtype, *, weight=None, centered=True, sums=False, **tiling) -> Case:
    """dx of such a norm from x, dy and any mean and rstd; with `sums` the cotangents of scale and bias too."""
    rows = (*shape[:-1], 1)
    kept = ((rows, jnp.float32),) * (2 if centered else 1)

    def call(machine: Machine, x, dy, *rest):
        (mean, rstd), rest = (rest[:2], rest[2:]) if centered else ((None, rest[0]), rest[1:])
        view = rows_of(shape, (len(shape) - 1,), [shape, rows, *(t.shape for t in rest)])
        assert view is not None
        low = None if mean is None else jnp.zeros_like(mean)
        given = Given(dy, mean, low, rstd, *rest)
        wanted = ("scale", "bias") if sums else ()
        found = row_norm_grad([x], given, view=view, machine=machine, wanted=wanted, **tiling)
        return (found.ds[0], *(found.sums[key].sum(1) for key in wanted))

    def plain(x, dy, *rest):
        (mean, rstd), rest = (rest[:2], rest[2:]) if centered else ((0.0, rest[0]), rest[1:])
        xhat = (x - mean) * rstd
        g = dy * rest[0] if rest else dy
        c0 = g.mean(-1, keepdims=True) if centered else 0.0
        dx = ((g - c0 - xhat * (g * xhat).mean(-1, keepdims=True)) * rstd).reshape(shape)
        over = tuple(range(len(shape) - 1))
        return (dx, (dy * xhat).sum(over)[None], dy.sum(over)[None]) if sums else (dx,)

    def base(x, dy, *rest):
        dx, *found = plain(x.astype(jnp.float32), dy.astype(jnp.float32), *rest)
        return (dx.astype(dtype), *found)

    def size(x, dy, *rest):
        """The largest of what dx is the difference of: of a row of 1 it is nothing else."""
        (mean, rstd), rest = (rest[:2], rest[2:]) if centered else ((0.0, rest[0]), rest[1:])
        xhat, g = (x - mean) * rstd, dy * rest[0] if rest else dy
        return float(np.max(abs(rstd) * (abs(g) + abs(xhat * (g * xhat).mean(-1, keepdims=True)))))

    given = () if weight is None else ((weight, jnp.float32),)
    shapes = ((shape, dtype), (shape, dtype), *kept, *given)
    return Case(name, call, shapes, plain, base=base, size=size)


def sums_case(name, shape, dtype, axes, *, mask=None, **tiling) -> Case:
    """sum(dy) and sum(x * dy) over axes."""

    def call(machine: Machine, x, dy, where=None):
        def terms(x, dy, where):
            g = dy if where is None else jnp.where(where, dy, 0.0)
            return g, x * g

        return sums(terms, [x, dy, where], axes=axes, number=2, name="sums", machine=machine, **tiling)

    def expected(x, dy, where=None):
        g = dy if where is None else np.where(where, dy, 0)
        return g.sum(axes, keepdims=True), (x * g).sum(axes, keepdims=True)

    def base(x, dy):
        x, dy = x.astype(jnp.float32), dy.astype(jnp.float32)
        return dy.sum(axes), (x * dy).sum(axes)

    given = () if mask is None else ((mask, "mask"),)
    return Case(
        name, call, ((shape, dtype), (shape, dtype), *given), expected, int(np.prod([shape[a] for a in axes])),
        None if mask else base,
    )  # fmt: skip


def moments_case(name, shape, dtype, axes, **tiling) -> Case:
    """Mean and sum of squared deviations over axes."""

    def call(machine: Machine, x):
        mean, _, m2 = moments(x, axes=axes, machine=machine, **tiling)
        return mean, m2

    def expected(x):
        return x.mean(axes, keepdims=True), ((x - x.mean(axes, keepdims=True)) ** 2).sum(axes, keepdims=True)

    def base(x):
        x = x.astype(jnp.float32)
        mean = x.mean(axes, keepdims=True)
        return mean, jnp.square(x - mean).sum(axes, keepdims=True)

    return Case(name, call, ((shape, dtype),), expected, int(np.prod([shape[a] for a in axes])), base)


def affine_case(name, shape, dtype, sides, *, mask=None, grad=False, **tiling) -> Case:
    """The affine map (or dx) with coefficients of shape `sides`."""
    small = ((sides, jnp.float32),) * 3
    given = ((shape, dtype), (shape, dtype), *small) if grad else ((shape, dtype), *small)
    given += () if mask is None else ((mask, "mask"),)

    def body(x, *rest):
        if grad:
            dy, rstd, c1, c0, *where = rest
            return grad_tile(x, dy, None, None, rstd, None, c1, c0, *where)
        mean, rstd, bias, *where = rest
        return affine_tile(x, mean, jnp.zeros_like(mean), rstd, None, bias, *where)

    def call(machine: Machine, *arrays):
        return (elementwise(body, arrays, name="affine", dtype=dtype, machine=machine, **tiling),)

    def expected(x, *rest):
        if grad:
            dy, rstd, c1, c0, *where = rest
            return ((dy - np.where(where[0] if where else True, c1 * x + c0, 0)) * rstd,)
        mean, rstd, bias, *_ = rest
        return ((x - mean) * rstd + bias,)

    def base(*arrays):
        wide = [t.astype(jnp.float32) for t in arrays]
        if grad:
            x, dy, rstd, c1, c0 = wide
            return ((dy - c1 * x - c0) * rstd).astype(dtype)
        x, mean, rstd, bias = wide
        return ((x - mean) * rstd + bias).astype(dtype)

    return Case(name, call, given, expected, base=None if mask else base)


def channel_case(name, shape, dtype, axes, *, group=1, centered=True, grad=False, behind=False, **tiling) -> Case:
    """A norm over channels with scale and bias, whole channels in one kernel: y and rstd, or dx, dbias and dscale.

    Channels are the last axis, in groups of `group`, or axis 1 where `axes` are (0, 2).
    """
    channel = 1 if 2 in axes and len(shape) == 3 else len(shape) - 1
    sides = tuple(n if i == channel else 1 for i, n in enumerate(shape))

    def split(t):
        return t.reshape(*t.shape[:-1], -1, group) if group > 1 else t

    def joined(t):
        return t.reshape(shape) if t.size == np.prod(shape) else t.reshape(*t.shape[:-2], -1)

    over = (*axes, len(shape)) if group > 1 else axes

    def by_channel(t):  # of statistics, from what `split` gave
        return np.repeat(t, group, -1).reshape(*t.shape[:-2], -1) if group > 1 else t

    def moments_of(x, xp=np):
        s = split(x)
        mean = s.mean(over, keepdims=True) if centered else 0.0
        return s, mean, 1 / xp.sqrt(((s - mean) ** 2).mean(over, keepdims=True) + EPS)

    def sets():
        found = sets_of(shape, axes, group=group, channel_axis=channel)
        assert found is not None
        return found

    def call(machine: Machine, x, *rest):
        here = sets()
        if not grad:
            out = channel_norm(x, *rest, sets=here, eps=EPS, machine=machine, centered=centered, **tiling)
            assert out is not None
            return out.y.reshape(shape), here.view.back(out.rstd)
        dy, mean, rstd, scale = rest
        given = Given(dy, mean if centered else None, jnp.zeros_like(mean) if centered else None, rstd, scale)
        back = channel_norm_grad(x, given, sets=here, machine=machine, **tiling)
        assert back is not None
        return back.dx.reshape(shape), here.view.back(back.s0), here.view.back(back.s1)

    def expected(x, *rest):
        if not grad:
            scale, bias, *more = rest
            s, mean, rstd = moments_of(x)
            return joined((s - mean) * rstd) * scale + bias + (more[0] if more else 0), by_channel(rstd)
        dy, mean, rstd, scale = rest
        xhat = (x - (mean if centered else 0)) * rstd
        g = dy * scale
        c0, c1 = (by_channel(split(t).mean(over, keepdims=True)) for t in (g, g * xhat))
        return (
            (g - xhat * c1 - (c0 if centered else 0)) * rstd,
            dy.sum(axes, keepdims=True),
            (dy * xhat).sum(axes, keepdims=True),
        )

    def size(x, *rest):
        return float(np.max(abs(rest[2] * rest[0] * rest[3]))) if grad else 1e-30

    small = ((sides, jnp.float32),)
    statistics = ((tuple(1 if i in axes else n for i, n in enumerate(shape)), jnp.float32),)
    given = ((shape, dtype), *statistics * 2, *small) if grad else (*small * 2, *(((shape, dtype),) if behind else ()))
    return Case(name, call, ((shape, dtype), *given), expected, size=size)


def cases() -> Iterator[Case]:
    """Every path of every kernel, in small arrays."""
    for tag, dtype in DTYPES.items():
        for path, shape, tiling in [
            ("resident", (33, 200), {}), ("chunks", (20, 700), {"chunk": 256, "residency": "row"}),
            ("streamed", (20, 700), {"chunk": 256, "residency": "stream"}), ("short", (300, 5), {}),
            ("one", (1, 1), {}), ("rank3", (3, 17, 384), {}),
        ]:  # fmt: skip
            features, rows = shape[-1:], shape[:-1]
            ones = (1,) * len(rows)
            per_feature, per_row = (*ones, *features), (*rows, 1)
            for norm, centered in (("layer", True), ("rms", False)):
                options: dict[str, Any] = {"centered": centered, **tiling}
                at = f"{norm}_norm/{path}/{tag}"
                yield row_case(at, shape, dtype, scale=per_feature, bias=per_feature, **options)
                yield row_case(f"{at}/plain", shape, dtype, **options)
                yield row_case(f"{at}/mask", shape, dtype, scale=per_feature, mask=shape, **options)
                yield row_case(f"{at}/row_mask", shape, dtype, bias=per_row, mask=per_feature, **options)
                yield row_case(f"{at}/full", shape, dtype, scale=shape, bias=(*ones, 1), **options)
                yield row_case(f"{at}/sum", shape, dtype, scale=per_feature, terms=2, **options)
                yield grad_case(f"{norm}_norm_grad/{path}/{tag}", shape, dtype, weight=per_feature, **options)
                yield grad_case(f"{norm}_norm_grad/{path}/{tag}/plain", shape, dtype, **options)
                yield grad_case(f"{norm}_norm_grad/{path}/{tag}/full", shape, dtype, weight=shape, **options)
                if not tiling:
                    at = f"{norm}_norm_grad/{path}/{tag}/sums"
                    yield grad_case(at, shape, dtype, weight=per_feature, sums=True, centered=centered)
            if len(shape) == 3:
                yield row_case(f"layer_norm/per_sample/{tag}", shape, dtype, scale=(shape[0], 1, shape[2]))
        for path, shape, axes in [
            ("columns", (300, 40), (0,)), ("wide", (70, 1300), (0,)), ("last", (40, 300), (1,)),
            ("middle", (4, 37, 20), (1,)), ("two", (4, 9, 6, 5), (0, 2, 3)), ("all", (33, 7), (0, 1)),
            ("long", (3, 9000), (1,)),
        ]:  # fmt: skip
            yield sums_case(f"sums/{path}/{tag}", shape, dtype, axes)
            yield sums_case(f"sums/{path}/{tag}/mask", shape, dtype, axes, mask=shape)
        for path, shape, axes in [
            ("columns", (300, 40), (0,)), ("tall", (9000, 33), (0,)), ("rows", (40, 300), (1,)),
            ("image", (5, 24, 77), (0, 2)), ("one", (7, 1), (0,)),
        ]:  # fmt: skip
            yield moments_case(f"moments/{path}/{tag}", shape, dtype, axes)
        for path, shape, axes, cut in [
            ("columns", (70, 40), (0,), {}), ("few", (300, 3), (0,), {}), ("chunks", (70, 150), (0,), {"rows": 16}),
            ("samples", (3, 37, 24), (1,), {}), ("streamed", (3, 70, 24), (1,), {"rows": 16, "residency": "stream"}),
            ("groups", (2, 37, 24), (1,), {"group": 4}), ("odd_groups", (2, 20, 60), (1,), {"group": 10, "rows": 16}),
            ("groups_streamed", (2, 70, 384), (1,), {"group": 128, "rows": 16, "residency": "stream"}),
            ("channels_first", (5, 24, 49), (0, 2), {}), ("first_chunks", (5, 24, 17), (0, 2), {"rows": 2}),
            ("first_streamed", (5, 40, 17), (0, 2), {"rows": 2, "residency": "stream"}),
            ("uncentred", (37, 24), (0,), {"centered": False}),
            ("uncentred_groups", (2, 37, 24), (1,), {"centered": False, "group": 8}),
        ]:  # fmt: skip
            cuts: dict[str, Any] = dict(cut)  # type: ignore[call-overload]
            yield channel_case(f"channel_norm/{path}/{tag}", shape, dtype, axes, **cuts)
            yield channel_case(f"channel_norm_grad/{path}/{tag}", shape, dtype, axes, grad=True, **cuts)
        yield channel_case(f"channel_norm/behind/{tag}", (70, 40), dtype, (0,), behind=True)
        for path, shape, sides in [
            ("channels_last", (6, 50, 24), (1, 1, 24)), ("channels_first", (6, 24, 50), (1, 24, 1)),
            ("per_sample", (6, 50, 24), (6, 1, 24)), ("per_row", (70, 300), (70, 1)), ("scalar", (70, 300), (1, 1)),
        ]:  # fmt: skip
            yield affine_case(f"affine/{path}/{tag}", shape, dtype, sides)
            yield affine_case(f"affine/{path}/{tag}/mask", shape, dtype, sides, mask=(*shape[:-1], 1))
            yield affine_case(f"grad_affine/{path}/{tag}", shape, dtype, sides, grad=True)
            yield affine_case(f"grad_affine/{path}/{tag}/mask", shape, dtype, sides, grad=True, mask=shape)


def large_cases(fewer: int = 1, shorter: int = 1) -> Iterator[Case]:
    """Those worth timing; `fewer` divides the number of rows, `shorter` their length."""

    def rows(m: int) -> int:
        return max(m // fewer, 1)

    for tag, dtype in (("f32", jnp.float32), ("bf16", jnp.bfloat16)):
        for d, m in ((1024, 131072), (4096, 32768), (8192, 16384), (65536, 2048)):
            shape, features = (rows(m), max(d // shorter, 1)), (1, max(d // shorter, 1))
            yield row_case(f"layer_norm/{m}x{d}/{tag}", shape, dtype, scale=features, bias=features)
            yield row_case(f"rms_norm/{m}x{d}/{tag}", shape, dtype, scale=features, centered=False)
            yield grad_case(f"layer_norm_grad/{m}x{d}/{tag}", shape, dtype, weight=features)
            if d <= 8192:
                yield grad_case(f"layer_norm_grads/{m}x{d}/{tag}", shape, dtype, weight=features, sums=True)
        shape, features = (rows(32768), max(4096 // shorter, 1)), (1, max(4096 // shorter, 1))
        yield row_case(f"add_rms_norm/32768x4096/{tag}", shape, dtype, scale=features, terms=2, centered=False)
        for c, m in ((256, 524288), (4096, 32768)):
            shape = (rows(m), max(c // shorter, 1))
            yield sums_case(f"column_sums/{m}x{c}/{tag}", shape, dtype, (0,))
            yield moments_case(f"column_moments/{m}x{c}/{tag}", shape, dtype, (0,))
        shape = (rows(524288), max(256 // shorter, 1))
        yield affine_case(f"channel_affine/524288x256/{tag}", shape, dtype, (1, shape[1]))
        yield affine_case(f"channel_grad/524288x256/{tag}", shape, dtype, (1, shape[1]), grad=True)
        image = (rows(64), 256, max(3136 // shorter, 1))
        yield moments_case(f"image_moments/64x256x3136/{tag}", image, dtype, (0, 2))

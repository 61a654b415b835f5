"""One wrong argument of quantisation at a time: refused with its name, what was seen and what was expected."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normlib as nl
from normlib import quantize

pytestmark = pytest.mark.family

KEY = jax.random.key(0)


@pytest.mark.parametrize(("build", "error", "match"), [
    (lambda: nl.Static(0.1, dtype=jnp.int16), ValueError, "`dtype` must be one of int8, .*got int16"),
    (lambda: nl.Static(0.1, rounding="up"), ValueError, "`rounding` must be one of rint, .*got 'up'"),
    (lambda: nl.Static(0.1, dtype=jnp.float8_e5m2, rounding="floor"), ValueError, "`rounding` must be one of rint, s"),
    (lambda: nl.Static(0.0), ValueError, r"`scale` must lie in \[2\*\*-126, 2\*\*126\].*got 0.0"),
    (lambda: nl.Static(np.array([0.1, -1.0])), ValueError, "`scale` must lie in .*got -1.0"),
    (lambda: nl.Static(1e-40), ValueError, "`scale` must lie in"),
    (lambda: nl.Static(float("nan")), ValueError, "`scale` must lie in"),
    (lambda: nl.Static(jnp.array([1e38])), ValueError, "`scale` must lie in"),
    (lambda: nl.Static(None), TypeError, "`scale` must be a float"),
    (lambda: nl.Static(2), TypeError, "`scale` must be a float"),
    (lambda: nl.Static(0.1, 2.5), TypeError, "`zero_point` must be an integer.*Round it first"),
    (lambda: nl.Static(0.1, 2**25), ValueError, r"`zero_point` must lie within 2\*\*24 of 0"),
    (lambda: nl.Static(0.1, 2, dtype=jnp.float8_e5m2), ValueError, "`zero_point` goes with integer codes only"),
    (lambda: nl.Static(0.1, lowest=-129), ValueError, "`lowest` must be a code .*got -129"),
    (lambda: nl.Static(0.1, lowest=1), ValueError, "`lowest` must be a code"),
    (lambda: nl.Static(0.1, lowest=-1, dtype=jnp.float8_e5m2), ValueError, "`lowest` must be a code"),
    (lambda: nl.Static(0.1, rounding="stochastic"), ValueError, "`key` goes with rounding='stochastic'.*got no key"),
    (lambda: nl.Static(0.1, key=KEY), ValueError, "`key` goes with .*got a key with rounding='rint'"),
    (lambda: nl.Dynamic(dtype=jnp.uint8), ValueError, "`dtype` must be one of int8, int4, float8"),
    (lambda: nl.Dynamic(floor=0.0), ValueError, r"`floor` must be a number in \[2\*\*-126"),
    (lambda: nl.Dynamic(floor=None), ValueError, "`floor` must be a number"),
    (lambda: nl.Dynamic(group=0), ValueError, "`group` must be a positive number of entries"),
    (lambda: nl.Dynamic(group=2.0), ValueError, "`group` must be a positive number of entries"),
    (lambda: nl.Asymmetric(dtype=jnp.int4), ValueError, "`dtype` must be one of int8; got int4"),
    (lambda: nl.Asymmetric(floor=-1.0), ValueError, "`floor` must be a number"),
    (lambda: nl.MX(jnp.int8), ValueError, "`dtype` must be one of float8_e4m3fn"),
    (lambda: nl.MX(scale_alg=1), ValueError, "`scale_alg` 1 is for fp8"),
    (lambda: nl.MX(jnp.float8_e5m2, scale_alg=2), ValueError, "`scale_alg` must be 0 or 1; got 2"),
    (lambda: nl.MX(rounding="half_away"), ValueError, "`rounding` must be one of rint, stochastic"),
    (lambda: nl.Dual(nl.Static(0.1), 3), TypeError, "`second` must be one of Static, Dynamic, Asymmetric, MX"),
    (lambda: nl.StraightThrough(nl.StraightThrough(nl.MX())), TypeError, "`kind` must be one of Static"),
])  # fmt: skip
def test_a_kind_is_checked_when_built(build, error, match):
    with pytest.raises(error, match=match):
        build()


X = jnp.ones((4, 64))
NORMS = {
    "layer": nl.layer_norm, "rms": nl.rms_norm,
    "inference": lambda x, **options: nl.batch_norm_inference(x, jnp.zeros(64), jnp.ones(64), **options),
}  # fmt: skip


@pytest.mark.parametrize(("call", "error", "match"), [
    (lambda q: q(X, quant="int8"), TypeError, "`quant` must be one of Static, .*got 'int8'"),
    (lambda q: q(X, quant=nl.Static), TypeError, "`quant` must be one of Static"),
    (lambda q: q(X, norm_round_first=True), ValueError, "give a `quant` with it"),
    (lambda q: q(X, quant=nl.Static(jnp.ones(3))), ValueError, r"`scale` must have shape \(64,\).*got \(3,\)"),
    (lambda q: q(X, quant=nl.Static(0.1, jnp.ones(3, int))), ValueError, r"`zero_point` must have shape \(64,\)"),
    (lambda q: q(X, quant=nl.Dynamic(jnp.ones(3))), ValueError, r"`smooth` must have shape \(64,\)"),
    (lambda q: q(X[:0], quant=nl.Dynamic(jnp.ones(3))), ValueError, r"`smooth` must have shape \(64,\)"),
])  # fmt: skip
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_refuses_what_does_not_fit(name, call, error, match):
    with pytest.raises(error, match=match):
        call(NORMS[name])


def test_groups_that_do_not_divide_the_row():  # CASES: E13
    with pytest.raises(ValueError, match=r"`group` 128 must divide the last axis.*\(2, 1160\)"):
        nl.rms_norm(jnp.ones((2, 1160)), quant=nl.Dynamic(group=128))
    with pytest.raises(ValueError, match="`group` 2 must divide the last axis of x, which must be normalised"):
        nl.rms_norm(jnp.ones((4, 4)), axis=0, quant=nl.Dynamic(group=2))


@pytest.mark.parametrize(("call", "error", "match"), [
    (lambda: nl.layer_norm(X.astype(jnp.complex64), quant=nl.Dynamic()), TypeError, "`quant` needs real values"),
    (lambda: quantize.apply(nl.Dynamic(), X.astype(jnp.complex64)), TypeError, "`quant` needs real values"),
    (lambda: quantize.apply(None, X), TypeError, "`quant` must be one of"),
    (lambda: quantize.apply(nl.Dynamic(), X, axes=2), ValueError, "`axes` 2 is out of range"),
    (lambda: quantize.apply(nl.Dynamic(), X, where=X), TypeError, "`where` must be boolean"),
    (lambda: quantize.apply(nl.MX(), 1.0, axes=()), ValueError, "MX needs an axis"),
    (lambda: nl.fake_quantize(nl.Dual(nl.MX(), nl.MX()), X), TypeError, "`quant` must be Static, Dynamic"),
    (lambda: nl.dequantize(X), TypeError, "`quantized` must be a Quantized"),
    (lambda: nl.dequantize(nl.Quantized(X, jnp.ones((4, 3)))), ValueError, "`scale` of shape .* neither per element"),
    (lambda: nl.dequantize(nl.Quantized(X, jnp.ones((4, 3), jnp.uint8))), ValueError, "one byte per 32"),
    (lambda: nl.pack(X), TypeError, "`codes` must be int4 or float4_e2m1fn; got float32"),
    (lambda: nl.pack(jnp.int4(3)), ValueError, "`codes` must have an axis"),
    (lambda: nl.unpack(X, jnp.int4), TypeError, "`packed` must be uint8"),
    (lambda: nl.unpack(jnp.ones(3, jnp.uint8), jnp.int8), TypeError, "`dtype` must be int4 or float4_e2m1fn"),
    (lambda: nl.unpack(jnp.ones(3, jnp.uint8), jnp.int4, size=4), ValueError, "`size` must be 6 or 5 for 3 .*got 4"),
    (lambda: nl.rms_norm_backward(X[:2], X, jnp.ones(4)), ValueError, r"`dy` must have x's shape \(4, 64\)"),
    (lambda: nl.rms_norm_backward(X, X, jnp.ones(5)), ValueError, r"`rstd` must have x's shape"),
    (lambda: nl.rms_norm_backward(X, X, jnp.ones(4), jnp.ones(3)), ValueError, "`scale` must have shape"),
    (lambda: nl.rms_norm_backward(X, X, jnp.ones(4), quant=1), TypeError, "`quant` must be one of"),
    (lambda: nl.rms_norm_backward(X, X, jnp.ones(4), backend="best"), ValueError, "`backend` must be one of"),
])  # fmt: skip
def test_bad_arguments_are_named(call, error, match):
    with pytest.raises(error, match=match):
        call()

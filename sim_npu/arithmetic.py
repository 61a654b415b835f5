"""Rounded arithmetic: what each primitive of a kernel gives under a policy.

Two things XLA does on CPU would spoil results that are not rounded to a narrower format: a product feeding a sum is
contracted to one rounding, and sums and products with constants are merged. Such results pass through an exclusive or
with a number that is always zero and that no compiler can know to be (`opaque_zero`). Divisors do too, per element,
since a division by a repeated divisor is turned into a product with its reciprocal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from sim_npu.precision import Kind, PrecisionPolicy
from sim_npu.reduction import ordered_sum
from sim_npu.rounding import DTYPE_FORMATS, FORMATS, approximate, int8_chain, round_to
from sim_npu.values import Value, container, is_float, joined_multiple

# Results that are one of the operands, or as exact as them: rounded only where a constant entered.
SELECTING = {"max", "min", "select_n", "clamp", "neg", "abs", "sign", "floor", "ceil", "round", "rem", "copy", "copy_p"}
COMPUTING = {
    "add", "add_any", "sub", "mul", "div", "pow", "integer_pow", "square", "sqrt", "rsqrt", "cbrt", "reciprocal",
    "exp", "exp2", "log", "log1p", "expm1", "tanh", "logistic", "sin", "cos", "tan", "asin", "acos", "atan", "atan2",
    "sinh", "cosh", "asinh", "acosh", "atanh", "erf", "erfc", "erf_inv", "lgamma", "digamma",
}  # fmt: skip
LOGICAL = {
    "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "not", "is_finite", "population_count", "clz",
    "shift_left", "shift_right_logical", "shift_right_arithmetic", "nextafter",
}  # fmt: skip
MOVING = {
    "broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "slice", "concatenate", "pad", "rev",
    "dynamic_slice", "dynamic_update_slice", "gather", "split", "sort", "iota", "stop_gradient", "optimization_barrier",
    "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_xor", "argmax", "argmin", "cummax", "cummin",
    "broadcast_to", "bitcast_convert_type", "pvary", "multiple_of", "max_contiguous",
}  # fmt: skip
SUMMING = {"reduce_sum", "cumsum", "reduce_prod", "dot_general"}
CASTING = {"convert_element_type", "reduce_precision"}
SUPPORTED = SELECTING | COMPUTING | LOGICAL | MOVING | SUMMING | CASTING
# The operands of these must have the shape of the result.
_ELEMENTWISE = SELECTING | COMPUTING | LOGICAL


def opaque_zero(arrays: Sequence[Any]) -> Any:
    """An int32 that is 0 for every input (n**3 - n is a multiple of 3) but not for a compiler; None without input."""
    for array in arrays:
        if array.size and is_float(array.dtype):
            first = lax.bitcast_convert_type(array[(0,) * array.ndim].astype(jnp.float32), jnp.int32)
        elif array.size and jnp.issubdtype(array.dtype, jnp.integer):
            first = array[(0,) * array.ndim].astype(jnp.int32)
        else:
            continue
        n = first & 0xFF
        return (n * n * n - n) % 3
    return None


class Arithmetic:
    """The rules of one kernel call.

    Attributes:
      policy: with `data` decided (not "input").
      zero: from `opaque_zero`.
    """

    def __init__(self, policy: PrecisionPolicy, zero: Any) -> None:
        self.policy = policy
        self.zero = zero

    def __call__(self, eqn: Any, values: Sequence[Value], *, feeds_sum: bool, scale: float | None) -> list[Value]:
        """Results of a supported equation. `scale` multiplies the operand of a sum."""
        name = eqn.primitive.name
        kind = Kind.CONSTANT
        for v in values[1:] if name == "select_n" else values:
            kind |= v.kind
        aval = eqn.outvars[0].aval
        if name in ("add", "sub") and kind == Kind.INPUT:
            feeds_sum = False  # a sum of inputs is a row, rounded like one; only what is made of it may stay wide
        format = self.format_for(aval.dtype, kind, feeds_sum)
        xs = [v.x for v in values]
        if name in CASTING:
            return [Value(self._cast(eqn, values[0], aval.dtype, format), kind, values[0].multiple)]
        if is_float(aval.dtype) and name in _ELEMENTWISE | MOVING:
            xs = [self.entering(v, format) for v in values]
        if name in _ELEMENTWISE:
            shapes = [jnp.shape(x) for x in xs]
            scalar_predicate = name in ("select_n", "clamp")
            xs = [
                x if s == aval.shape or (scalar_predicate and s == ()) else jnp.broadcast_to(x, aval.shape)
                for x, s in zip(xs, shapes)
            ]
        if is_float(aval.dtype) and name in COMPUTING:
            exposed = any(v.kind == Kind.CONSTANT for v in values)
            return [Value(self._compute(eqn, name, xs, format, exposed), kind)]
        if is_float(aval.dtype) and name in SUMMING:
            return self._sum(eqn, name, xs, kind, scale)
        params = dict(eqn.params)
        if name == "iota":
            params["dtype"] = container(params["dtype"])
        if name in ("multiple_of", "max_contiguous"):  # hints, which change no value
            hint = params.get("values", 1)
            return [Value(xs[0], kind, hint if name == "multiple_of" and isinstance(hint, int) else 1)]
        if name == "bitcast_convert_type":
            return [Value(self._bitcast(eqn, xs[0]), kind)]
        out = eqn.primitive.bind(*xs, **params)
        results = list(out) if eqn.primitive.multiple_results else [out]
        return [Value(r, kind, _multiple(name, values)) for r in results]

    def format_for(self, dtype: Any, kind: Kind, feeds_sum: bool = False) -> str:
        """Format a result of this dtype and kind is rounded to: the kernel's own narrow type, else the policy's."""
        own = DTYPE_FORMATS.get(jnp.dtype(dtype).name, "fp32") if is_float(dtype) else "fp32"
        return own if own != "fp32" else self.policy.format_of(kind, feeds_sum=feeds_sum)

    def rounded(self, x: Any, format: str, mode: str | None = None) -> Any:
        """`x` in `format`; saturated in fp32 too where the policy says so."""
        mode = mode or self.policy.arithmetic_mode(format)
        if FORMATS[format].is_fp32 and self.policy.overflow == "inf":
            return x
        return round_to(x, format, mode=mode, overflow=self.policy.overflow)  # type: ignore[arg-type]

    def loaded(self, x: Any, dtype: Any, kind: Kind) -> Any:
        """An input block as it lies in the unified buffer: in the data type where that is narrower."""
        return self.rounded(x, self.format_for(dtype, kind)) if is_float(dtype) else x

    def entering(self, value: Value, format: str) -> Any:
        """An operand; a float constant as the vector unit gets it, in `format`."""
        if value.kind != Kind.CONSTANT or not is_float(jnp.result_type(value.x)):
            return value.x
        return self.rounded(jnp.asarray(value.x, jnp.float32), format)

    def _guarded(self, x: Any) -> Any:
        if self.zero is None:
            return x
        return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) ^ self.zero, jnp.float32)

    def _settled(self, x: Any, format: str, guard: bool) -> Any:
        if not FORMATS[format].is_fp32 or self.policy.overflow != "inf":
            return self.rounded(x, format)
        return self._guarded(x) if guard else x

    def divide(self, a: Any, b: Any, format: str) -> Any:
        """a / b, rounded once as IEEE 754 has it, then to `format`."""
        a, b = jnp.broadcast_arrays(jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32))
        if self.zero is not None:
            word = lax.bitcast_convert_type(b, jnp.int32) ^ (lax.bitcast_convert_type(a, jnp.int32) & self.zero)
            b = lax.bitcast_convert_type(word, jnp.float32)
        return self._settled(a / b, format, guard=False)

    def multiply(self, a: Any, b: Any, format: str) -> Any:
        """a * b rounded to `format`."""
        return self._settled(a * b, format, guard=True)

    def add(self, a: Any, b: Any, format: str) -> Any:
        """a + b rounded to `format`."""
        return self._settled(a + b, format, guard=False)

    def _compute(self, eqn: Any, name: str, xs: list[Any], format: str, exposed: bool) -> Any:
        if name == "mul":
            return self.multiply(xs[0], xs[1], format)
        if name == "div":
            return self.divide(xs[0], xs[1], format)
        if name == "square":
            return self.multiply(xs[0], xs[0], format)
        if name == "integer_pow":
            return self._power(xs[0], eqn.params["y"], format)
        if name in ("rsqrt", "reciprocal"):
            return self._inverse(name, xs[0], format)
        if name in ("add", "add_any", "sub"):
            return self._settled(xs[0] - xs[1] if name == "sub" else xs[0] + xs[1], format, guard=exposed)
        return self._settled(eqn.primitive.bind(*xs, **eqn.params), format, guard=False)

    def _power(self, x: Any, exponent: int, format: str) -> Any:
        """By squaring, every product rounded."""
        result, base, left = None, x, abs(exponent)
        while left:
            if left & 1:
                result = base if result is None else self.multiply(result, base, format)
            left >>= 1
            if left:
                base = self.multiply(base, base, format)
        if result is None:
            return jnp.ones_like(x)
        return self.divide(jnp.ones_like(x), result, format) if exponent < 0 else result

    def _inverse(self, name: str, x: Any, format: str) -> Any:
        """1 / x or 1 / sqrt(x): approximate instruction, or square root and division, each rounded."""
        bits = self.policy.approximate_bits
        if bits is not None:
            exact = self.divide(1.0, lax.sqrt(x) if name == "rsqrt" else x, "fp32")
            return self.rounded(approximate(exact, bits), format)
        return self.divide(1.0, self._settled(lax.sqrt(x), format, guard=False) if name == "rsqrt" else x, format)

    def _sum(self, eqn: Any, name: str, xs: list[Any], kind: Kind, scale: float | None) -> list[Value]:
        result_kind = Kind.CONSTANT if kind == Kind.CONSTANT else Kind.STATISTIC
        format = self.format_for(eqn.outvars[0].aval.dtype, result_kind)
        wide = self.policy.accumulator if format == "fp32" else format
        if name == "reduce_sum":
            x = xs[0] if scale is None else self.multiply(xs[0], jnp.float32(scale), wide)
            total = ordered_sum(
                self.rounded(x, wide),
                eqn.params["axes"],
                order=self.policy.order,
                add=lambda a, b: self.add(a, b, wide),
                itemsize=2 if wide in ("fp16", "bf16") else 4,
            )
            return [Value(total, result_kind)]
        if name == "cumsum":
            return [Value(self._running_sum(self.rounded(xs[0], wide), eqn.params, wide), result_kind)]
        if name == "dot_general":
            # The cube unit: exact products, float32 sums in its own order.
            params = dict(eqn.params, preferred_element_type=jnp.dtype("float32"), precision=lax.Precision.HIGHEST)
            return [Value(self.rounded(eqn.primitive.bind(*xs, **params), format), result_kind)]
        return [Value(self._product(xs[0], eqn.params["axes"], wide), result_kind)]

    def _running_sum(self, x: Any, params: dict[str, Any], format: str) -> Any:
        lanes = jnp.moveaxis(x, params["axis"], 0)

        def step(total: Any, row: Any) -> tuple[Any, Any]:
            total = self.add(total, row, format)
            return total, total

        _, sums = lax.scan(step, jnp.zeros_like(lanes[0]), lanes, reverse=params["reverse"])
        return jnp.moveaxis(sums, 0, params["axis"])

    def _product(self, x: Any, axes: Sequence[int], format: str) -> Any:
        lanes = jnp.moveaxis(x, axes, range(len(axes)))
        lanes = lanes.reshape((-1, *lanes.shape[len(axes) :]))
        step = lambda total, row: (self.multiply(total, row, format), None)  # noqa: E731
        return lax.scan(step, jnp.ones_like(lanes[0]), lanes)[0]

    def _cast(self, eqn: Any, value: Value, dtype: Any, format: str) -> Any:
        x = value.x
        if eqn.primitive.name == "reduce_precision":
            same = {(f.fraction_bits, _exponent_bits(f)): f.name for f in FORMATS.values() if f.has_inf}
            name = same.get((eqn.params["mantissa_bits"], eqn.params["exponent_bits"]))
            return eqn.primitive.bind(x, **eqn.params) if name is None else self.rounded(x, name, self.policy.cast)
        source = jnp.result_type(x)
        if is_float(dtype):
            wide = jnp.asarray(x).astype(jnp.float32)
            if DTYPE_FORMATS.get(jnp.dtype(eqn.invars[0].aval.dtype).name) == format:
                return wide  # a widening cast of what already is a value of the format
            own = DTYPE_FORMATS.get(jnp.dtype(dtype).name, "fp32") != "fp32"
            return self.rounded(wide, format, self.policy.cast if own else None)
        if is_float(source) and dtype == jnp.int8 and self.policy.int8_chain:
            return int8_chain(x)
        return jnp.asarray(x).astype(dtype)

    def _bitcast(self, eqn: Any, x: Any) -> Any:
        """Through the kernel's own types, since a container's bits are not the value's bits."""
        own = jnp.asarray(x).astype(eqn.invars[0].aval.dtype)
        out = lax.bitcast_convert_type(own, eqn.outvars[0].aval.dtype)
        return out.astype(container(out.dtype))


def _exponent_bits(format: Any) -> int:
    return round(math.log2(2 - format.min_exponent)) + 1


def _multiple(name: str, values: Sequence[Value]) -> int:
    if name == "mul":
        return math.prod(v.multiple for v in values)
    if name in ("add", "sub", "max", "min"):
        return joined_multiple(*(v.multiple for v in values))
    if name == "select_n":
        return joined_multiple(*(v.multiple for v in values[1:]))
    if name in ("broadcast_in_dim", "reshape", "squeeze", "copy", "copy_p"):
        return values[0].multiple
    return 1

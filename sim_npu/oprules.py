"""Which cost class each primitive belongs to, and how many vector instructions stand for it."""

from __future__ import annotations

ARITH, SLOW = "arith", "transcendental"
# Primitive -> (cost class, instructions over the whole shape). Rsqrt and logistic as kernels write them:
# the hardware's Rsqrt and Reciprocal are approximations, so Sqrt and Div are used.
RULES: dict[str, tuple[str, int]] = {
    **dict.fromkeys(("add", "sub", "mul", "max", "min", "neg", "abs", "and", "or", "xor", "not"), (ARITH, 1)),
    **dict.fromkeys(("shift_left", "shift_right_logical", "shift_right_arithmetic", "square", "iota"), (ARITH, 1)),
    **dict.fromkeys(("sign", "clamp"), (ARITH, 2)),
    **dict.fromkeys(("add_any",), (ARITH, 1)),
    **dict.fromkeys(("sin", "cos", "erf", "tan"), (ARITH, 12)),
    **dict.fromkeys(("div", "sqrt", "exp", "log"), (SLOW, 1)),
    **dict.fromkeys(("rsqrt", "log1p", "expm1", "exp2"), (SLOW, 2)),
    **dict.fromkeys(("logistic", "pow", "rem"), (SLOW, 3)),
    "tanh": (SLOW, 4),
    **dict.fromkeys(("floor", "ceil", "round", "convert_element_type", "bitcast_convert_type"), ("cast", 1)),
    "reduce_precision": ("cast", 2),
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge", "is_finite"), ("compare", 1)),
    "select_n": ("select", 1),
    **dict.fromkeys(("concatenate", "pad", "copy", "dynamic_update_slice"), ("move", 1)),
    **dict.fromkeys(("transpose", "rev"), ("transpose", 1)),
    **dict.fromkeys(("gather", "scatter", "scatter-add", "sort"), ("gather", 1)),
}
REDUCTIONS = {"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin"}
# Outside kernels, XLA does these without moving data, or folds them into what follows.
FREE = {"reshape", "squeeze", "expand_dims", "stop_gradient", "broadcast_in_dim", "iota", "copy", "slice", "pvary"}
VIEWS = {"stop_gradient", "copy_p", "optimization_barrier", "slice", "dynamic_slice", "split"}


def multiplications(power: int) -> int:
    """Multiplications to raise to an integer power by squaring; a negative power adds a division's worth of two."""
    n = abs(power)
    return max(1, n.bit_length() - 1 + n.bit_count() - 1) + (2 if power < 0 else 0)

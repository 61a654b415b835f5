"""What the public functions are given: arrays as shapes, and the mistakes that are told before anything is traced."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

import jax

from sim_npu.chips import ChipSpec
from sim_npu.plan import TilePlan


def shapes_of(args: tuple) -> tuple:
    """`args` with a ShapeDtypeStruct in place of every array and every `(shape, dtype)` pair, nested as they are.

    >>> shapes_of((((4, 8), "float16"),))[0].shape
    (4, 8)

    Raises:
      ValueError: for a shape that is not made of sizes, or a dtype that JAX does not know.
    """
    out = []
    for i, arg in enumerate(args):
        try:
            out.append(jax.tree.map(as_shape, arg, is_leaf=_is_shape))
        except (TypeError, ValueError) as error:
            raise ValueError(f"`args[{i}]` must be an array, a ShapeDtypeStruct or (shape, dtype): {error}.") from error
    return tuple(out)


def as_shape(arg: Any) -> Any:
    """A ShapeDtypeStruct for an array, a struct or a `(shape, dtype)` pair; other values unchanged."""
    if _is_shape(arg):
        return jax.ShapeDtypeStruct(_sizes(arg[0]), jax.numpy.dtype(arg[1]))
    if hasattr(arg, "shape") and hasattr(arg, "dtype"):
        return jax.ShapeDtypeStruct(_sizes(arg.shape), arg.dtype)
    if isinstance(arg, str):
        raise ValueError(f"{arg!r} is no array; a shape beside a dtype must be a tuple")
    return arg


def _is_shape(arg: Any) -> bool:
    return isinstance(arg, tuple) and len(arg) == 2 and isinstance(arg[0], tuple) and not isinstance(arg[1], tuple)


def _sizes(shape: tuple) -> tuple[int, ...]:
    try:
        sizes = tuple(operator.index(n) for n in shape)
    except TypeError as error:
        raise ValueError(f"its shape {tuple(shape)} is not made of whole numbers") from error
    if any(n < 0 for n in sizes):
        raise ValueError(f"its shape {sizes} has a negative size")
    return sizes


def check_call(fn: Callable, shaped: tuple, kwargs: dict[str, Any]) -> None:
    """Whether a function takes these arguments.

    Raises:
      TypeError: for too few, too many or unknown arguments of `fn`.
      ValueError: if `fn` is no function.
    """
    if not callable(fn):
        raise ValueError(f"`fn` must be a function of arrays; got {fn!r}.")
    name = getattr(fn, "__name__", repr(fn))
    try:
        inspect.signature(fn).bind(*shaped, **kwargs)
    except TypeError as error:
        raise TypeError(f"`fn` ({name}) cannot be called with these arguments: {error}.") from error
    except ValueError:  # built-in callables have no signature
        pass


def refuse_empty(shaped: tuple) -> None:
    """A kernel's arrays have elements.

    Raises:
      ValueError: for an array without any.
    """
    for i, arg in enumerate(shaped):
        for leaf in jax.tree.leaves(arg):
            if 0 in getattr(leaf, "shape", ()):
                raise ValueError(
                    f"`args[{i}]` must have at least one element along every axis for a kernel; its shape is "
                    f"{tuple(leaf.shape)}."
                )


def plan_for(plan: TilePlan | None, chip: ChipSpec) -> TilePlan:
    """The plan that `plan=` means on a chip: None is double buffering, where the chip has two buffers.

    Raises:
      ValueError: if it is no TilePlan, or deeper than a queue position has buffers.
    """
    most = deepest(chip)
    if plan is None:
        return TilePlan(queue_depth=min(TilePlan().queue_depth, most))
    if not isinstance(plan, TilePlan):
        raise ValueError(f"`plan` must be a TilePlan or None; got {plan!r}.")
    if plan.queue_depth > most:
        raise ValueError(
            f"`queue_depth` of the plan must be at most {most}, the buffers that a queue position of {chip.name} has; "
            f"got {plan.queue_depth}."
        )
    return plan


def deepest(chip: ChipSpec) -> int:
    """Buffers of one queue position, and flags to hand them over."""
    return min(chip.max_queue_depth, chip.event_ids)

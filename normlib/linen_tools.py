"""Tools for whole linen models: the moments that every batch norm sees, and batch norms with other arguments."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from typing import Any

from flax import linen as nn

from normlib import linen
from normlib._models import check_changes, measured, without_name
from normlib.moments import Moments

BATCH_NORMS = (nn.BatchNorm, linen.BatchNorm)
COLLECTION = "batch_moments"


def apply_with_moments(module: nn.Module, variables: Any, *args, mutable: Any = False, **kwargs) -> tuple[Any, Any]:
    """`module.apply`, and the moments of what each of its batch norms was given.

    Flax's own BatchNorm and normlib's are measured, in training and evaluation mode alike, by one more pass over
    their input: this device's entries, those where a `mask` holds. A layer called twice has both calls merged.
    Works under jit, grad, vmap and shard_map; models with nn.scan or nn.vmap map the collection `batch_moments` as
    they map `batch_stats`.

    Args:
      module: any linen module.
      variables: as for `apply`.
      args, kwargs: as for `apply`.
      mutable: collections to return, as for `apply`: a name, a list of names or False. New running statistics are
        dropped unless "batch_stats" is among them.

    Returns:
      (what `apply` returns, moments): the latter in the structure of `batch_stats`, with one `Moments` per layer,
        its entries of the shape of the running statistics.

    Raises:
      TypeError: for a `mutable` of another kind.

    >>> from flax import linen as nn
    >>> model = nn.BatchNorm(use_running_average=False)
    >>> variables = model.init(jax.random.key(0), jnp.ones((2, 1)))
    >>> (y, updates), moments = apply_with_moments(model, variables, jnp.array([[1.0], [3.0]]), mutable="batch_stats")
    >>> moments.mean.tolist(), int(moments.count[0])
    ([2.0], 2)
    """
    if mutable is not False and not isinstance(mutable, str | list | tuple):
        raise TypeError(f"`mutable` must be a collection's name, a list of names or False; got {mutable!r}.")
    wanted = [] if mutable is False else [mutable] if isinstance(mutable, str) else list(mutable)
    with nn.intercept_methods(_measure):
        y, updates = module.apply(variables, *args, mutable=[*wanted, "batch_stats", COLLECTION], **kwargs)
    moments = without_name(updates.get(COLLECTION, {}))
    updates = {name: updates[name] for name in wanted if name in updates}
    return (y if mutable is False else (y, updates)), moments


def _measure(call, args, kwargs, context):
    module = context.module
    stands_in = isinstance(module, _Converted)  # for a layer that has been measured already
    if isinstance(module, BATCH_NORMS) and not stands_in and context.method_name == "__call__":
        moments = measured(module, args[0] if args else kwargs["x"], kwargs.get("mask"))
        module.sow(COLLECTION, "moments", moments, init_fn=lambda: None, reduce_fn=_both)
    return call(*args, **kwargs)


def _both(old: Moments | None, new: Moments) -> Moments:
    return new if old is None else old.merge(new)


# of every class made by a conversion, the class it came from and the changes, so that another one adds to them
CONVERSIONS: weakref.WeakKeyDictionary[type, tuple[type, dict[str, Any]]] = weakref.WeakKeyDictionary()


EXTENDED = (linen.BatchNormAct, linen.ConditionalBatchNorm)


class _Converted:
    """Marks a batch norm that stands in for another: not converted again."""


@functools.cache
def _converted(kind: type) -> type:
    """The class that stands in for a batch norm of class `kind`: BatchNorm, or one of those that extend it."""
    found = next((own for own in EXTENDED if issubclass(kind, own)), linen.BatchNorm)
    return type(found.__name__, (_Converted, found), {"__module__": found.__module__})


def convert_batch_norm(module: nn.Module, **changes: Any) -> nn.Module:
    """`module` with every batch norm inside computed by `normlib.linen.BatchNorm` with `changes` to its arguments.

    Every other argument stays, and so do parameters, collections, names and initial values: checkpoints keep loading.
    Layers created in `setup`, in compact methods or passed in as attributes are all found, since calls are replaced,
    not constructors. The result acts in its own `init`, `init_with_output` and `apply` (convert the outermost
    module); `bind` gives the layers as they were.

    Args:
      module: any linen module.
      changes: arguments of `normlib.linen.BatchNorm` such as axis_name="data" (SyncBN), virtual_batch_size=32 (Ghost
        BN), frozen=True, momentum, unbiased=True. Not those that change which parameters or statistics exist.

    Returns:
      A module of a subclass of `module`'s class with the same attributes.

    Raises:
      TypeError: for no change at all, an argument BatchNorm does not have, or one that would change its variables.

    >>> from flax import linen as nn
    >>> model = nn.Sequential([nn.Dense(2), nn.BatchNorm(use_running_average=False)])
    >>> ghost = convert_batch_norm(model, virtual_batch_size=2)
    >>> ghost.init_with_output(jax.random.key(0), jnp.ones((4, 3)))[0].shape
    (4, 2)
    """
    check_changes(linen.BatchNorm.__dataclass_fields__, changes)
    kind, earlier = CONVERSIONS.get(type(module), (type(module), {}))
    changes = {**earlier, **changes}

    def replace(call, args, kwargs, context):
        old = context.module
        if not isinstance(old, BATCH_NORMS) or isinstance(old, _Converted) or context.method_name != "__call__":
            return call(*args, **kwargs)
        # in the old layer's own scope, so that its variables are found under the old names
        scope: Any = old.scope
        kind: Any = type(old)
        return _converted(kind)(**{**_arguments(old), **changes}, parent=scope)(*args, **kwargs)

    def active(name):
        @nn.nowrap
        def method(self, *args, **kwargs):
            with nn.intercept_methods(replace):
                return getattr(super(converted, self), name)(*args, **kwargs)

        return method

    methods = {name: active(name) for name in ("init", "init_with_output", "apply")}
    converted = type(kind.__name__, (kind,), {**methods, "__module__": kind.__module__, "__doc__": kind.__doc__})
    CONVERSIONS[converted] = kind, changes
    return converted(**_arguments(module))


def _arguments(module: nn.Module) -> dict[str, Any]:
    return {
        field.name: getattr(module, field.name)
        for field in dataclasses.fields(module)
        if field.init and field.name not in ("parent", "name")
    }

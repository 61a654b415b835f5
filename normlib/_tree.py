"""Paths in trees of parameters and statistics: linen's dicts, nnx states, and plain ones alike."""

from __future__ import annotations

from typing import Any

from jax.tree_util import GetAttrKey

Path = tuple[str, ...]


def names_of(path: tuple[Any, ...]) -> Path:
    """A key path of jax.tree_util as names; the `value` inside an nnx variable is no name of its own.

    >>> names_of(jax.tree_util.tree_flatten_with_path({"bn": [0]})[0][0][0])
    ('bn', '0')
    """
    if path and isinstance(path[-1], GetAttrKey) and path[-1].name == "value":
        path = path[:-1]
    return tuple(str(_name(key)) for key in path)


def _name(key: Any) -> Any:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return key

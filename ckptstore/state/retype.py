"""Give decoded values back the types that their counterparts in the state have."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Any

import numpy as np

from ckptstore.errors import StateMismatch


def retype(value: Any, like: object, name: str) -> Any:
    """`value`, the content of the leaf `name`, with the subclasses (a named tuple, a defaultdict, an enum) of `like`.

    Only where both are of one base type; else the value counts as it is. Raises StateMismatch if a type refuses it.
    """
    try:
        return _retype(value, like)
    except (TypeError, ValueError) as error:
        raise StateMismatch(f"{name}: {type(like).__qualname__} does not take what was saved: {error}") from error


def _retype(value: Any, like: object) -> Any:
    kind: Any = type(like)
    if isinstance(value, dict) and isinstance(like, dict):
        items: Iterable[Any] = {k: _retype(v, like[k]) if k in like else v for k, v in value.items()}
        if type(value) is not dict or kind is dict:
            return type(value)(items)
        if kind in (OrderedDict, Counter):
            return kind(items)
        made = copy.copy(like)  # keeps a default_factory
        made.clear()
        made.update(items)
        return made
    if isinstance(value, list | tuple) and isinstance(like, list | tuple):
        items = [_retype(v, like[i]) if i < len(like) else v for i, v in enumerate(value)]
        if not isinstance(like, type(value)):
            return type(value)(items)
        return kind(*items) if hasattr(like, "_fields") else kind(items)
    base = type(value)
    if base in (int, float, str, bytes) and isinstance(like, base) and not isinstance(like, bool | np.generic):
        return kind(value)
    return value

"""What every backend must do. A test module subclasses `BackendConformance` and gives it two fixtures:

``backend``, an empty store, and ``reopen``, a function that opens the same store once more; each closes what it opened.
Tests are coroutines, for pytest-asyncio in its auto mode.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from .common import DATA, A, keys, stream
from .listing import ListingConformance
from .reading import ReadingConformance
from .writing import WritingConformance

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from backends.base import Backend

__all__ = ["DATA", "A", "BackendConformance", "keys", "stream"]


class BackendConformance(ReadingConformance, WritingConformance, ListingConformance):
    """Inherit, and supply ``backend`` and ``reopen``, as plain or asynchronous fixtures."""

    @pytest.fixture
    def backend(self) -> Backend | AsyncIterator[Backend]:
        raise NotImplementedError("the subclass supplies an empty store")

    @pytest.fixture
    def reopen(self) -> Callable[[], Backend] | AsyncIterator[Callable[[], Backend]]:
        raise NotImplementedError("the subclass supplies a function that opens the same store again")

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.save.processes import private_runtime


@pytest.fixture
def runtime() -> Iterator[Path]:
    """A runtime folder of the test's own; fails the test if an agent is left in it."""
    with private_runtime() as folder:
        yield folder

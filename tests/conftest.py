"""What every test of a store needs: a folder for the agent, and proof afterwards that no agent is left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.save.processes import private_runtime


@pytest.fixture
def runtime_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime folder of this test alone, set in the environment; fails the test if an agent is left in it."""
    with private_runtime() as folder:
        path = folder / "run"
        monkeypatch.setenv("CKPTSTORE_RUNTIME_DIR", str(path))
        yield path

"""What every test of a store needs: a folder for the agent, and proof afterwards that no agent is left."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

_GRACE = 15.0  # seconds an agent may take to end after its last trainer closed


@pytest.fixture
def runtime_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime folder of this test alone, set in the environment; its agents must end by themselves."""
    with tempfile.TemporaryDirectory(prefix="ckpt-") as name:
        path = Path(name) / "run"
        monkeypatch.setenv("CKPTSTORE_RUNTIME_DIR", str(path))
        yield path
        deadline = time.monotonic() + _GRACE
        while agents(path) and time.monotonic() < deadline:
            time.sleep(0.02)
        left = agents(path)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert not left, f"agents {left} outlived their trainers"


def agents(runtime_dir: Path) -> list[int]:
    """The agents that serve from this runtime folder, or one whose name begins like it (a second node's)."""
    wanted, found = os.fsencode(runtime_dir), []
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with contextlib.suppress(OSError):  # it may end just now
                command = (process / "cmdline").read_bytes().split(b"\0")
                if b"ckptstore.agent" in command and any(word.startswith(wanted) for word in command):
                    found.append(int(process.name))
    return found

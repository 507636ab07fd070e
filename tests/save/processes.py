"""What the crash tests do to processes: find the agents of a runtime folder, stop them, wait for what must come."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_GRACE = 15.0  # seconds that an agent may take to end once nobody needs it


@contextmanager
def private_runtime() -> Iterator[Path]:
    """A runtime folder with a short path, as sockets need; at the end no agent may be left in it."""
    folder = Path(tempfile.mkdtemp(prefix="ck-", dir="/tmp"))
    try:
        yield folder
        deadline = time.monotonic() + _GRACE
        while agents(folder) and time.monotonic() < deadline:
            time.sleep(0.02)
        logs = "".join(log.read_text(errors="replace")[-3000:] for log in folder.rglob("*.log"))
        assert not agents(folder), f"agents {agents(folder)} are left in {folder}; their log:\n{logs}"
    finally:
        for pid in agents(folder):
            kill(pid)
        shutil.rmtree(folder)


def agents(runtime: Path) -> list[int]:
    """The agent processes of this runtime folder and those below it, those that are just starting too."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdecimal():
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                if "ckptstore.agent" in words and any(Path(word).is_relative_to(runtime) for word in words):
                    found.append(int(entry.name))
    return found


def the_agent(runtime: Path) -> int:
    """The one agent that serves; another that was started at the same time may take a moment to see that."""
    until(lambda: len(agents(runtime)) == 1, "one agent to be left")
    return agents(runtime)[0]


def until(found: Callable[[], T], what: str, seconds: float = 30) -> T:
    """What `found` returns once that is true."""
    deadline = time.monotonic() + seconds
    while True:
        result = found()
        if result:
            return result
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.0005)


def stop(pid: int) -> None:
    """SIGSTOP, and wait until every thread stands."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: set(states(pid)) == {"T"}, f"process {pid} to stop")


def go_on(pid: int) -> None:
    os.kill(pid, signal.SIGCONT)


def kill(pid: int) -> None:
    """SIGKILL, and wait until it is gone or a zombie."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    until(lambda: not alive(pid), f"process {pid} to end")


def alive(pid: int) -> bool:
    return not set(states(pid)) <= {"Z", "X"}


def states(pid: int) -> list[str]:
    """The state of each thread of a process: R, S, D, T, Z."""
    found = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found.append((task / "stat").read_text().rpartition(")")[2].split()[0])
    return found


def status(pid: int | str, field: str) -> int:
    """A number from /proc/<pid>/status: Threads, or RssShmem in KiB."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1])


def descriptors(pid: int | str) -> list[str]:
    """What the open descriptors of a process lead to, sorted, without their numbers."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # the one that lists the folder
            target = os.readlink(entry)
            found.append(target.partition(":[")[0] if ":[" in target else target)
    return sorted(found)

"""What `save` returns: how far the save is, and how it ended."""

from __future__ import annotations

import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import AgentLost, CheckpointError, WaitTimeout


@dataclass
class SaveStats:
    """Figures of one save, of all ranks unless said otherwise; None: not known yet. ``stats["x"]`` works too."""

    stall_seconds: float | None = None  #: this rank's training was held up
    bytes_state: int | None = None  #: unique bytes of the state
    bytes_written: int | None = None  #: bytes that this save added to storage's packs
    bytes_deduplicated: int | None = None  #: bytes that storage had already
    bytes_copied: int | None = None  #: this rank copied into host memory
    seconds_to_durable: float | None = None  #: from the call of save until this rank knew
    upload_seconds: float | None = None  #: of that, the agent's work
    durability: str | None = None  #: fsync, replicated, upload or process

    def __getitem__(self, name: str) -> Any:
        return asdict(self)[name]


class SaveHandle:
    """One save on its way. Thread-safe. Dropping it changes nothing: the save goes on."""

    def __init__(self, step: int, started: float) -> None:
        """:param started: time.perf_counter() when save was called."""
        self.step = step
        self.skipped = False
        self.stats = SaveStats()
        self.run = self.ordinal = 0  #: which attempt it is
        self.observed = False  #: somebody has been told how it ended
        self._started = started
        self._staged, self._ended = threading.Event(), threading.Event()
        self._error: CheckpointError | None = None

    def wait_staged(self, timeout: float | None = None) -> None:
        """Wait until the agent has the snapshot: from then on it becomes durable even if every trainer dies.

        In `blocking` mode the state may be changed as soon as `save` has returned.

        :raises WaitTimeout: not within `timeout` seconds. :raises AgentLost: no agent could be had.
        """
        if not self._staged.wait(timeout):
            raise WaitTimeout(f"step {self.step}: this node's agent did not take the snapshot within {timeout} s")
        if isinstance(self._error, AgentLost):
            raise self._error

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is durable.

        :raises WaitTimeout: not within `timeout` seconds; the save goes on.
        :raises CheckpointError: what went wrong: SaveFailed, Superseded, OutcomeUnknown, ReplicaMismatch.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error

    result = wait

    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self._ended.is_set()

    def exception(self, timeout: float | None = None) -> CheckpointError | None:
        """What went wrong, None if it is durable. :raises WaitTimeout: neither within `timeout` seconds."""
        error = self.peek(timeout)
        self.observed = True
        return error

    def peek(self, timeout: float | None) -> CheckpointError | None:
        """As `exception`, for those who tell nobody."""
        if not self._ended.wait(timeout):
            who = "the agent's upload and commit" if self._staged.is_set() else "the agent to take the snapshot"
            raise WaitTimeout(f"step {self.step}: not durable within {timeout} s; waited for {who}")
        return self._error

    def left(self, copied: int) -> None:
        """`save` returns now, having copied so many bytes."""
        self.stats.bytes_copied = copied
        self.stats.stall_seconds = time.perf_counter() - self._started

    def staged(self) -> None:
        """The agent has accepted the snapshot."""
        self._staged.set()

    def finish(self, error: CheckpointError | None, stats: dict[str, Any] | None = None) -> None:
        """The save has ended."""
        for name, value in (stats or {}).items():
            setattr(self.stats, name, value)
        self.stats.seconds_to_durable = None if error else time.perf_counter() - self._started
        self._error = error
        self._staged.set()
        self._ended.set()

    def __repr__(self) -> str:
        state = "ended" if self.done() else "staged" if self._staged.is_set() else "staging"
        return f"<SaveHandle step={self.step} {state}>"

"""SIGTERM on any rank, told to all ranks at the same step."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import TYPE_CHECKING, Any

from .errors import ConfigError
from .group import Group

if TYPE_CHECKING:
    import torch.distributed as dist


class _Listener:
    """The process's one handler of SIGTERM, there as long as some store asks."""

    def __init__(self) -> None:
        self.told = False
        self._users = 0
        self._process = 0
        self._previous: Any = None

    def join(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError("preempted() must first be called in the main thread, where Python handles signals")
        if not self._users:
            self.told, self._process = False, os.getpid()
            self._previous = signal.signal(signal.SIGTERM, self._handle)
        self._users += 1

    def leave(self) -> None:
        self._users -= 1
        main = threading.current_thread() is threading.main_thread()
        if not self._users and main and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a forked child, which asks no store
            signal.signal(number, self._previous)
            os.kill(os.getpid(), number)
            return
        self.told = True
        if callable(self._previous):
            self._previous(number, frame)


_listener = _Listener()


class Preemption:
    """One small all-reduce a step, in a group of its own: the only way that all ranks learn it at the same step."""

    def __init__(self, process_group: dist.ProcessGroup | None, timeout: float) -> None:
        self._group = Group(process_group, timeout)
        self._joined = False
        self._answer = False

    def ask(self) -> bool:
        """Whether any rank has got SIGTERM by now. Collective."""
        if not self._joined:
            _listener.join()
            self._joined = True
        self._answer = self._group.any(self._answer or _listener.told)
        return self._answer

    def close(self) -> None:
        if self._joined:
            _listener.leave()
        self._joined = False
        self._group.close()

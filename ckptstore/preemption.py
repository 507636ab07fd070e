"""SIGTERM on any rank, told to all ranks at the same step."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import TYPE_CHECKING, Any

from .errors import ConfigError
from .group import Group

if TYPE_CHECKING:
    import torch.distributed as dist


class Preemption:
    """One small all-reduce a step, in a group of its own: the only way that all ranks learn it at the same step."""

    def __init__(self, process_group: dist.ProcessGroup | None, timeout: float) -> None:
        self._group = Group(process_group, timeout)
        self._told = False
        self._previous: Any = None
        self._installed = False

    def ask(self) -> bool:
        """Whether any rank has got SIGTERM by now. Collective."""
        if not self._installed:
            self._install()
        self._told = self._group.any(self._told)
        return self._told

    def _install(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError("preempted() must first be called in the main thread, where Python handles signals")
        self._previous = signal.signal(signal.SIGTERM, self._handle)
        self._installed = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._told = True
        if callable(self._previous):
            self._previous(number, frame)

    def close(self) -> None:
        if self._installed and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._previous)
        self._installed = False
        self._group.close()

"""Become a process that neither holds nor is held by the job that started it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from pathlib import Path

_PR_SET_DUMPABLE = 4
_IOPRIO_SET, _IOPRIO_WHO_PROCESS, _IOPRIO_LOWEST_BEST_EFFORT = {"x86_64": 251, "aarch64": 30}, 1, (2 << 13) | 7
_NICE = 10
_LOG_LIMIT = 16 << 20


def detach(log: Path) -> None:
    """Fork twice, lead a session, leave the job's folder and pipes: one with its stdout would hold a piped torchrun."""
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)
    os.chdir("/")
    log_to(log)


def log_to(log: Path) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    if log.exists() and log.stat().st_size > _LOG_LIMIT:
        flags |= os.O_TRUNC
    out, null = os.open(log, flags, 0o600), os.open(os.devnull, os.O_RDONLY)
    sys.stdout.flush()
    sys.stderr.flush()
    for source, target in ((null, 0), (out, 1), (out, 2)):
        os.dup2(source, target)
    for fd in {null, out} - {0, 1, 2}:
        os.close(fd)


def step_back() -> None:
    """Let training have the processors and the disk first, and keep other processes out of this one's memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    os.nice(max(0, _NICE - os.nice(0)))
    call = _IOPRIO_SET.get(os.uname().machine)
    if call is not None:
        libc.syscall(call, _IOPRIO_WHO_PROCESS, 0, _IOPRIO_LOWEST_BEST_EFFORT)
    with contextlib.suppress(OSError):  # torchrun may have pinned the trainer; a cpuset still holds
        os.sched_setaffinity(0, range(os.cpu_count() or 1))

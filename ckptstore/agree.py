"""All ranks succeed, or all raise: how a stage that ranks go through together ends.

A rank's failure becomes a message, every rank sends one and reads all, and only then does anything raise; so no rank
is left waiting for another that has given up.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeVar

from .errors import CheckpointError, CorruptCheckpoint, StateMismatch, named
from .group import Group

T = TypeVar("T")

#: What all ranks raise alike: the first of these that any rank met, unless some rank met anything else.
_SHARED: tuple[type[CheckpointError], ...] = (CorruptCheckpoint, StateMismatch)


def together(group: Group, work: Callable[[], T]) -> T:
    """Do this rank's work and return its result, if all ranks' work succeeded.

    :raises CorruptCheckpoint: some rank raised it; on all ranks, with the same text.
    :raises StateMismatch: the same, where no rank met corruption.
    :raises Exception: this rank's own error, as it was.
    :raises CheckpointError: another rank's error; of the same class if that is one of ours.
    """
    failure: Exception | None = None
    try:
        result = work()
    except Exception as error:
        failure = error
    said = group.gather(json.dumps(None if failure is None else [_kind(failure), str(failure)]).encode())
    failures = {rank: (report[0], report[1]) for rank, data in enumerate(said) if (report := json.loads(data))}
    if not failures:
        return result
    verdict = _verdict(failures, group, failure)
    raise verdict from (failure if verdict is not failure else failure.__cause__)


def from_first(group: Group, work: Callable[[], bytes]) -> bytes:
    """Rank 0's work, its result on every rank; its error too, as `together` has it."""
    return group.gather(together(group, lambda: work() if group.rank == 0 else b""))[0]


def _kind(error: Exception) -> str:
    """The name of the nearest class that other ranks know."""
    return next((kind.__name__ for kind in _SHARED if isinstance(error, kind)), type(error).__name__)


def _verdict(failures: dict[int, tuple[str, str]], group: Group, own: Exception | None) -> Exception:
    """What this rank raises, given what failed on which rank."""
    shared = {kind.__name__: kind for kind in _SHARED}
    for rank, (name, text) in failures.items():
        if name not in shared:
            if own is not None and _kind(own) not in shared:
                return own
            kind = named(name)
            if kind is not None:
                return kind(f"rank {rank}: {text}")
            return CheckpointError(f"rank {rank} failed: {name}: {text}")
    decisive = next(kind for kind in _SHARED if any(name == kind.__name__ for name, _ in failures.values()))
    ranks: dict[str, list[int]] = {}
    for rank, (name, text) in failures.items():
        if name == decisive.__name__:
            ranks.setdefault(text, []).append(rank)
    if list(map(len, ranks.values())) == [group.size]:
        return decisive(next(iter(ranks)))
    return decisive("\n".join(f"rank {', '.join(map(str, which))}: {text}" for text, which in ranks.items()))

"""Load, from end to end: locate -> parts -> read plan -> fetch -> verify -> place; on all ranks together."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from backends.base import Backend

from ..agree import from_first, together
from ..errors import CorruptCheckpoint, LoadIncomplete, StepNotFound
from ..format import commit as commits
from ..format.commit import Commit
from ..format.keys import Slot
from ..format.model import SliceKey
from ..group import Group
from ..state.restore import Restore, template
from . import locate
from .fetch import fetch
from .place import Placer
from .plan import Plan, plan
from .report import LoadReport
from .storage import Storage

log = logging.getLogger("ckptstore")

Run = Callable[[Coroutine[Any, Any, Any]], Any]
Where = tuple[str, int]  #: name, and the rank it belongs to


def load(
    backend: Backend,
    run: Run,
    group: Group,
    state: Mapping[str, object],
    *,
    step: int | Literal["latest"],
    strict: bool,
    cast: bool,
    timeout: float,
    concurrency: int,
    touching: Callable[[], None],
) -> LoadReport:
    """Read a checkpoint into `state`, in place. All ranks call it, and all return or all raise.

    :param run: runs a coroutine to its end and returns its result.
    :param timeout: seconds until the other ranks must have called too, and until a request must be answered.
    :param concurrency: requests in flight at once.
    :param touching: called, on all ranks alike, right before the state changes. If an error follows, the state in
        memory belongs to no step.
    :raises StepNotFound: there is no checkpoint of `step`.
    :raises StateMismatch: the checkpoint does not fit the state, which it has not changed.
    :raises CorruptCheckpoint: `step` does not verify; or with "latest", none does. The message names the objects.
    :raises LoadIncomplete: parts of a corrupt checkpoint are in place which no older one has.
    :raises WaitTimeout: other ranks or storage did not come or answer in time.
    :raises CheckpointError: another rank failed; the message names it and its error. That rank raises the error itself,
        which may be one of the backend's.
    """
    started = time.monotonic()
    group.meet("load")
    storage = Storage(backend, concurrency, timeout)
    choice = _Choice(locate.Candidates(storage, step), run, group)
    target = _Target(storage, run, group, state, strict, cast, touching)
    while commit := choice.next():
        try:
            missing, values = target.fill(commit)
        except CorruptCheckpoint as error:
            if step != "latest":
                raise
            choice.rejected.append((commit.attempt.step, str(error)))
            continue
        return LoadReport(
            commit.attempt.step,
            values,
            missing,
            "storage",
            time.monotonic() - started,
            storage.bytes_read,
            storage.requests,
            choice.rejected,
            commit.slot,
        )
    if step != "latest":
        raise StepNotFound(f"there is no checkpoint of step {step}; steps() lists those there are")
    if choice.rejected:
        tried = "".join(f"\n  step {step}: {reason}" for step, reason in choice.rejected)
        raise CorruptCheckpoint(f"none of the checkpoints in the store verifies:{tried}")
    return LoadReport(None, seconds=time.monotonic() - started)


@dataclass
class _Choice:
    """Which checkpoint is tried next: rank 0 finds it, all ranks know it."""

    candidates: locate.Candidates
    run: Run
    group: Group
    rejected: list[tuple[int, str]] = field(default_factory=list)  #: on all ranks alike
    told: int = 0

    def next(self) -> Commit | None:
        slot, text, skipped = json.loads(from_first(self.group, self._find))
        self.rejected += [(step, reason) for step, reason in skipped]
        if slot is None:
            return None
        if self.group.rank == 0:
            for step, reason in self.rejected[self.told :]:
                log.warning("step %d cannot be loaded: %s; falling back to step %d", step, reason, slot[0])
        self.told = len(self.rejected)
        commit = commits.decode(text.encode(), Slot(*slot))
        assert isinstance(commit, Commit)
        return commit

    def _find(self) -> bytes:
        skipped: list[tuple[int, str]] = []
        commit = self.run(self.candidates.next(skipped))
        if commit is None:
            return json.dumps((None, None, skipped)).encode()
        slot = (commit.slot.step, commit.slot.run, commit.slot.generation)
        return json.dumps((slot, commits.encode(commit).decode(), skipped)).encode()


@dataclass
class _Target:
    """The state, and how a checkpoint gets into it."""

    storage: Storage
    run: Run
    group: Group
    state: Mapping[str, object]
    strict: bool
    cast: bool
    touching: Callable[[], None]
    written: set[str] = field(default_factory=set)  #: names that a checkpoint left behind which then proved corrupt

    def fill(self, commit: Commit) -> tuple[list[str], dict[str, object]]:
        """Bring the checkpoint into the state, and return the names that it lacks and its plain values.

        :raises CorruptCheckpoint: some rank found it corrupt, maybe after parts of it were in place.
        """
        restore, values, todo = together(self.group, lambda: self._prepare(commit))
        self.touching()
        self.written |= {target.key.name for target in restore.targets}
        read = together(self.group, lambda: self._read(restore, values, todo))
        self.written |= {name for name, _ in values}
        return restore.missing, together(self.group, lambda: restore.apply(read))

    def _prepare(self, commit: Commit) -> tuple[Restore, dict[Where, SliceKey], Plan]:
        """Everything that can fail before anything changes."""
        catalog = locate.Catalog(commit, self.run(locate.read_parts(self.storage, commit)))
        rank, size = self.group.rank, self.group.size
        restore = template(self.state, catalog, rank=rank, world_size=size, strict=self.strict, cast=self.cast)
        self._refuse_mixture(commit.attempt.step, restore.missing)
        values = {where: catalog.value(*where) for where in restore.values}
        wants = [*(target.key for target in restore.targets), *values.values()]
        return restore, values, plan(wants, catalog.saved)

    def _refuse_mixture(self, step: int, missing: list[str]) -> None:
        """What this checkpoint lacks must not have come from another."""
        mixed = [name for name in self.written if any(f"{name}/".startswith(f"{lacking}/") for lacking in missing)]
        if mixed:
            raise LoadIncomplete(
                f"a newer checkpoint proved corrupt after parts of it were in place, and step {step} lacks "
                f"{', '.join(sorted(mixed))}: build the state anew and load step {step} into it"
            )

    def _read(self, restore: Restore, values: dict[Where, SliceKey], todo: Plan) -> dict[Where, bytes]:
        """Fill the targets, and return the values' encodings."""
        buffers = {where: torch.empty(key.nbytes, dtype=torch.uint8) for where, key in values.items()}
        place = Placer(todo.wants, [*(target.tensor for target in restore.targets), *buffers.values()])
        place.synchronize()
        self.run(fetch(self.storage, todo, place))
        place.synchronize()
        return {where: buffer.numpy().tobytes() for where, buffer in buffers.items()}

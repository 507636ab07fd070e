"""Which checkpoints are this store's history: runs in order, each resumed from a step of what was visible before it.

``visible(run n) = commits of run n  +  what was visible before it, up to the step it resumed from``. What a run left
behind by a later resume is abandoned: hidden from `latest`, kept until pruned.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from backends.base import Backend
from backends.errors import NotFound

from ..errors import CorruptCheckpoint
from ..format import commit as commits
from ..format import document, keys
from ..format.commit import Aborted, Commit
from ..format.keys import Slot

_READERS = 16  # commits read at a time


@dataclass(frozen=True, slots=True)
class Run:
    """One start of a job that saves. `resumed_from` is the step it went on from, None for a start from scratch.

    `base` is the slot that holds that step: a run before it may overwrite the step later, which changes nothing here.
    """

    number: int
    id: str
    resumed_from: int | None
    base: Slot | None = None


@dataclass(frozen=True, slots=True)
class History:
    runs: tuple[Run, ...]  #: in order of their numbers
    slots: tuple[Slot, ...]  #: every slot there is, commit or aborted, visible or not

    def visible(self) -> list[Slot]:
        """The slots of the newest run's lineage: highest step first, and of one step the newest run first."""
        seen: list[Slot] = []
        for run in self.runs:
            limit = run.resumed_from
            seen = [slot for slot in seen if limit is not None and slot.step <= limit]
            seen = [slot for slot in seen if slot.step != limit or slot == run.base]
            seen += [slot for slot in self.slots if slot.run == run.number]
        return sorted(seen, reverse=True)

    def outran(self, slot: Slot) -> Run | None:
        """The newer run, if any, that leaves this slot out of the history: it resumed before the slot's step.

        A step saved again belongs to the newest run alone, too: an older one must not replace what it stands on.
        """
        for run in self.runs:
            before = run.resumed_from is None or run.resumed_from < slot.step
            if run.number > slot.run and (before or slot.generation > 0):
                return run
        return None


async def read(backend: Backend) -> History:
    """The store's runs and slots, by listing.

    :raises CorruptCheckpoint: a run's document is gone or not what was written, so that the history cannot be known.
    """
    slots = [slot async for info in backend.list(keys.COMMITS) if (slot := keys.parse_slot(info.key))]
    runs = await read_runs(backend)  # after the slots, so that none lacks its run
    lost = {slot.run for slot in slots} - {run.number for run in runs}
    if lost:
        names = ", ".join(str(keys.run_key(run)) for run in sorted(lost))
        raise CorruptCheckpoint(f"{names} of {backend.url} is gone, so which of its checkpoints count cannot be known")
    return History(tuple(runs), tuple(slots))


async def read_runs(backend: Backend) -> list[Run]:
    numbers = [n async for info in backend.list(keys.RUNS) if (n := keys.parse_run(info.key)) is not None]
    return list(await asyncio.gather(*(_read_run(backend, number) for number in sorted(numbers))))


async def _read_run(backend: Backend, number: int) -> Run:
    key = keys.run_key(number)
    body = document.decode(await backend.get(key, limit=document.LIMIT), key, "run")
    try:
        base = None if body["base"] is None else Slot(*map(int, body["base"]))
        return Run(number, str(body["id"]), None if base is None else base.step, base)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptCheckpoint(f"{key}: a run with a wrong field: {error!r}") from error


def encode_run(run: Run) -> bytes:
    base = None if run.base is None else run.base.to_json()
    return document.encode("run", {"id": run.id, "resumed_from": run.resumed_from, "base": base})


async def read_slot(backend: Backend, slot: Slot) -> Commit | Aborted | None:
    """What the slot holds, None while it is empty.

    :raises CorruptCheckpoint: it holds something else.
    """
    try:
        return commits.decode(await backend.get(slot.key, limit=document.LIMIT), slot)
    except NotFound:
        return None


async def steps(backend: Backend) -> list[Commit]:
    """The checkpoints of the lineage, lowest step first; what does not verify is left out."""
    history = await read(backend)
    gate = asyncio.Semaphore(_READERS)

    async def one(slot: Slot) -> Commit | None:
        async with gate:
            try:
                found = await read_slot(backend, slot)
            except CorruptCheckpoint:
                return None  # `verify` and `load` are where this is told
        return found if isinstance(found, Commit) else None

    found = await asyncio.gather(*(one(slot) for slot in history.visible()))
    newest: dict[int, Commit] = {}
    for commit in found:
        if commit is not None:
            newest.setdefault(commit.attempt.step, commit)
    return sorted(newest.values(), key=lambda commit: commit.attempt.step)

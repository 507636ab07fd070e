"""Starting a run: one per start of a job that saves, numbered by whoever gets the number first."""

from __future__ import annotations

import uuid
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from backends.base import Backend
from backends.errors import AlreadyExists, NotFound

from ..errors import ConfigError, CorruptCheckpoint, LineageError, StepExists, StepNotFound
from ..format import document, keys
from ..format.keys import Slot
from . import lineage
from .lineage import Run

#: What `start` takes for a run that has not loaded: it goes on from the latest step.
NOT_LOADED = -1


@dataclass(frozen=True, slots=True)
class Started:
    """A run that may save. `steps`: those its lineage has, each with the newest generation of its slots."""

    run: Run
    steps: dict[int, int]

    def to_json(self) -> dict[str, Any]:
        base = None if self.run.base is None else self.run.base.to_json()
        return {"run": [self.run.number, self.run.id, self.run.resumed_from, base], "steps": list(self.steps.items())}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Started:
        number, id_, resumed_from, base = found["run"]
        return cls(Run(number, id_, resumed_from, None if base is None else Slot(*base)), dict(found["steps"]))


async def start(backend: Backend, first_step: int | None, loaded: int | None, overwrite: bool) -> Started:
    """Register a run whose first save is of `first_step` (None: a rollback, which saves nothing yet).

    :param loaded: the step the state was loaded from, None if the store was empty then, NOT_LOADED without a load.
    :raises LineageError: the first step has no place behind what is stored; the message names the choices.
    :raises StepExists: the step is stored, and `overwrite` is false.
    :raises StepNotFound: the step to go on from is no longer in the lineage.
    """
    await check_marker(backend)
    while True:
        history = await lineage.read(backend)
        commits = {commit.attempt.step: commit for commit in await lineage.steps(backend)}
        latest = max(commits, default=None)
        resumed_from = latest if loaded == NOT_LOADED else loaded
        if resumed_from is not None and resumed_from not in commits:
            raise StepNotFound(
                f"step {resumed_from} is not in the lineage of {backend.url} any more; it has {_list(commits)}"
            )
        kept = {step for step in commits if resumed_from is not None and step <= resumed_from}
        if first_step is not None:
            _check_place(backend.url, first_step, sorted(kept), loaded, overwrite)
        number = 1 + max([run.number for run in history.runs], default=0)
        base = commits[resumed_from].slot if resumed_from is not None else None
        run = Run(number, uuid.uuid4().hex, resumed_from, base)
        try:
            await backend.put_if_absent(keys.run_key(number), lineage.encode_run(run))
        except AlreadyExists:
            continue  # another job started in between: look again
        return Started(run, {step: max(s.generation for s in history.slots if s.step == step) for step in kept})


def _check_place(url: str, step: int, kept: list[int], loaded: int | None, overwrite: bool) -> None:
    """Whether a first save of `step` has its place behind the steps `kept` by the run."""
    earlier = [other for other in kept if other < step]
    back = f"rollback({earlier[-1]}) gives up what came after step {earlier[-1]}; " if earlier else ""
    if step in kept:
        if not overwrite:
            raise StepExists(f"step {step} is in {url} already: overwrite=True replaces it; {back}another URL is empty")
    elif loaded == NOT_LOADED and kept and step < kept[-1]:
        raise LineageError(
            f"the first save is of step {step}, but {url} has step {kept[-1]} and nothing was loaded: load() first to "
            f"go on from there; {back}or use another URL for a new training"
        )


async def check_marker(backend: Backend) -> None:
    """Make the store on first use, and learn whether it lets only one of two writers create an object.

    :raises ConfigError: it does not, or the store is of another version.
    """
    try:
        found = await backend.get(keys.MARKER, limit=document.LIMIT)
    except NotFound:
        await _make_marker(backend)
        found = await backend.get(keys.MARKER, limit=document.LIMIT)
    try:
        document.decode(found, keys.MARKER, "store")
    except CorruptCheckpoint as error:
        raise ConfigError(f"{backend.url} is not a store that this version can use: {error}") from error


async def _make_marker(backend: Backend) -> None:
    data = document.encode("store", {})
    with suppress(AlreadyExists):
        await backend.put_if_absent(keys.MARKER, data)
    with suppress(AlreadyExists):
        await backend.put_if_absent(keys.MARKER, data)
        raise ConfigError(f"{backend.url} lets two writers create one object, so saves could overwrite each other")


def _list(commits: dict[int, object] | object) -> str:
    steps = sorted(commits) if isinstance(commits, dict) else []
    return f"steps {steps[-5:]}" if steps else "no steps"

"""From the snapshots of single ranks to attempts: gather those of this node, have them persisted, tell the ranks."""

from __future__ import annotations

import asyncio
import gc
import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from backends import open_backend
from backends.base import Backend
from backends.errors import BackendError

from ..errors import CheckpointError, SaveFailed
from ..format.keys import Attempt, Slot
from ..repo import lineage
from . import wire
from .line import Client
from .persist import Persister
from .submission import Submission

log = logging.getLogger("ckptstore.agent")

_REFUSALS = 64  # attempts back that a late rank may still ask about

Work = Callable[[Persister], Awaitable[dict[str, Any]]]  #: ends an attempt, and returns its statistics


@dataclass(eq=False)
class Gathering:
    """An attempt, and the snapshots that have come from this node's ranks."""

    attempt: Attempt
    expected: tuple[int, ...]
    client: Client  #: whose settings and credentials count: that of the rank that came first
    got: dict[int, tuple[Submission, Client]] = field(default_factory=dict)
    deadline: asyncio.TimerHandle | None = None

    @property
    def missing(self) -> list[int]:
        return sorted(set(self.expected) - set(self.got))

    def add(self, submission: Submission, client: Client) -> None:
        before = self.got.pop(submission.plan.rank, None)
        if before is not None:
            before[0].segment.close()
        self.got[submission.plan.rank] = submission, client


class Saves:
    """All attempts of one store on one node. `running`: their uploads, and what else ends them."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.incarnation = secrets.token_hex(4)
        self.bases: dict[int, Slot] = {}  #: the commit that each run resumed from
        self.gone: set[tuple[int, int]] = set()  #: (run, rank) whose trainer ended
        self.running: set[asyncio.Task[None]] = set()
        self._gatherings: dict[tuple[int, int], Gathering] = {}
        self._refused: dict[tuple[int, int], CheckpointError] = {}  #: attempts that some rank will not submit, and why
        self._persisters: dict[int, tuple[Persister, Backend]] = {}
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="hash")

    @property
    def busy(self) -> bool:
        return bool(self.running or self._gatherings)

    async def close(self) -> None:
        for _, backend in self._persisters.values():
            await backend.close()
        self._pool.shutdown()

    async def take(self, submission: Submission, client: Client) -> None:
        """Accept a rank's snapshot; its segment is closed once the attempt has ended."""
        attempt, ranks = submission.attempt, submission.plan.local_ranks
        key = (attempt.run, attempt.ordinal)
        if key not in self._gatherings:
            gathering = self._gatherings[key] = Gathering(attempt, ranks, client)
            loop = asyncio.get_running_loop()
            gathering.deadline = loop.call_later(client.settings["timeout"], self._overdue, gathering)
        gathering = self._gatherings[key]
        gathering.add(submission, client)
        if not gathering.missing:
            submissions = [submission for submission, _ in gathering.got.values()]
            timeout = client.settings["timeout"]
            self._end(gathering, lambda persister: persister.save(submissions, timeout))
        elif key in self._refused:
            self._abort(gathering, self._refused[key])
        elif submission.again and len(gathering.got) == 1:
            self._start(self._recall(gathering))
        self.give_up_on_the_gone(nobody_left=False)
        await client.tell({"type": "accepted", "run": attempt.run, "ordinal": attempt.ordinal})

    def refuse(self, attempt: Attempt, error: CheckpointError, client: Client) -> None:
        """A rank says that its snapshot of this attempt will not come: what it says is what all hear."""
        key = (attempt.run, attempt.ordinal)
        self._refused[key] = error
        for old in list(self._refused)[:-_REFUSALS]:
            del self._refused[old]
        # where no other rank has come, nobody here is to be told, but there may be other nodes
        self._abort(self._gatherings.setdefault(key, Gathering(attempt, (), client)), error)

    def give_up_on_the_gone(self, nobody_left: bool) -> None:
        """Abort what waits for ranks that have ended; with nobody left, all that waits."""
        for gathering in list(self._gatherings.values()):
            run, step = gathering.attempt.run, gathering.attempt.step
            gone = [rank for rank in gathering.missing if nobody_left or (run, rank) in self.gone]
            if gone:
                self._abort(
                    gathering, SaveFailed(f"ranks {gone} ended before their snapshot of step {step} was complete")
                )

    def _overdue(self, gathering: Gathering) -> None:
        missing, step = gathering.missing, gathering.attempt.step
        self._abort(gathering, SaveFailed(f"ranks {missing} of this node did not submit step {step} in time"))

    def _abort(self, gathering: Gathering, error: CheckpointError) -> None:
        again = any(submission.again for submission, _ in gathering.got.values())
        self._end(gathering, lambda persister: persister.abandon(gathering.attempt, error, again))

    async def _recall(self, gathering: Gathering) -> None:
        """Answer at once for an attempt that an agent before this one has ended; its other ranks may know already."""
        try:
            found = await lineage.read_slot(self._persister(gathering).backend, gathering.attempt.slot)
        except (BackendError, CheckpointError) as error:
            log.warning("%s cannot be read: %s", gathering.attempt.slot, error)
            return
        if found is not None and gathering in self._gatherings.values():
            self._end(gathering, lambda persister: persister.conclude(found))

    def _end(self, gathering: Gathering, work: Work) -> None:
        """Do what ends the attempt, and tell its ranks how it ended."""
        del self._gatherings[gathering.attempt.run, gathering.attempt.ordinal]
        if gathering.deadline:
            gathering.deadline.cancel()
        self._start(self._finish(gathering, work))

    async def _finish(self, gathering: Gathering, work: Work) -> None:
        answer: wire.Message = {"error": None}
        try:
            answer["stats"] = await work(self._persister(gathering))
        except CheckpointError as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        except Exception as error:  # the handle must end, whatever is wrong here
            log.exception("saving %s", gathering.attempt)
            answer = {"error": "SaveFailed", "message": f"the agent failed: {type(error).__name__}: {error}"}
        run, ordinal = gathering.attempt.run, gathering.attempt.ordinal
        message = {"type": "outcome", "run": run, "ordinal": ordinal, **answer}
        for submission, client in gathering.got.values():
            submission.segment.close()
            await client.tell(message)
        if answer["error"]:
            gc.collect()  # a failure's traceback refers to the segments, and in a circle, so they would stay mapped

    def _persister(self, gathering: Gathering) -> Persister:
        run, client = gathering.attempt.run, gathering.client
        if run not in self._persisters:
            backend = open_backend(self.url, client.environment)
            age, base = client.settings["dedup_max_age"], self.bases.get(run)
            self._persisters[run] = Persister(backend, self.incarnation, self._pool, age, base), backend
        return self._persisters[run][0]

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self.running.add(task)
        task.add_done_callback(self.running.discard)

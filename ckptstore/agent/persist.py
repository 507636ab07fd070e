"""Phase two of the saves of one run on this node: one attempt at a time, each ended by what its slot says."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from backends.base import Backend
from backends.errors import BackendError, NoSpace

from ..errors import (
    CheckpointError,
    CorruptCheckpoint,
    OutcomeUnknown,
    ReplicaMismatch,
    SaveFailed,
    StorageFull,
    by_name,
)
from ..format import part as part_format
from ..format.commit import Aborted, Commit
from ..format.keys import Attempt, Slot
from ..repo import lineage
from . import commit as committing
from .attempt import NodeSave
from .index import ChunkIndex
from .submission import Submission

log = logging.getLogger("ckptstore.agent")


class Persister:
    """Makes the snapshots of one run on this node durable, one attempt at a time."""

    def __init__(
        self, backend: Backend, incarnation: str, pool: ThreadPoolExecutor, max_age: float, base: Slot | None
    ) -> None:
        """:param base: the commit that the run resumed from; what it has need not be written again."""
        self.backend, self.incarnation, self.pool = backend, incarnation, pool
        self.index = ChunkIndex(max_age)
        self._base = base
        self._turn = asyncio.Lock()

    async def save(self, submissions: Sequence[Submission], timeout: float) -> dict[str, Any]:
        """Make the attempt durable and return its statistics.

        :raises SaveFailed: aborted, nothing is visible. :raises Superseded: committed, but outside the history.
        :raises OutcomeUnknown: storage did not answer whether the commit stands.
        """
        deadline = asyncio.get_running_loop().time() + timeout
        async with self._turn:
            work = NodeSave(self, submissions)
            try:
                async with asyncio.timeout_at(deadline):
                    return await work.run()
            except TimeoutError as error:
                failure: CheckpointError = SaveFailed(f"not durable within {timeout:g} s (TIMEOUT): {work.waiting()}")
                failure.__cause__ = error
            except NoSpace as error:
                failure = StorageFull(f"{error}; free space there, the next save will try again")
            except (BackendError, CorruptCheckpoint) as error:
                failure = SaveFailed(str(error))
            except (SaveFailed, ReplicaMismatch) as error:
                failure = error
            except CheckpointError:
                raise  # the slot is filled
            except Exception as error:  # an impossible plan, say; whatever it is, the slot must be filled
                log.exception("saving %s", work.attempt)
                failure = SaveFailed(f"{type(error).__name__}: {error}")
            return await work.give_up(failure)

    async def abandon(self, attempt: Attempt, why: CheckpointError, again: bool) -> dict[str, Any]:
        """Fill the slot of an attempt whose snapshots are not complete with `aborted`, and conclude.

        :param again: an agent before this one had it, and may have got further.
        :raises CheckpointError: as `save`.
        """
        try:
            found = await committing.fill(self.backend, Aborted(attempt, type(why).__name__, str(why)))
        except BackendError as error:  # other nodes then learn it at their deadline
            kind = OutcomeUnknown if again else SaveFailed
            raise kind(f"{why}; and {attempt.slot} could not be filled: {error}") from error
        return await self.conclude(found)

    async def conclude(self, found: Commit | Aborted) -> dict[str, Any]:
        """The statistics of an attempt whose slot is filled.

        :raises CheckpointError: as `save`; what the slot says, if it holds `aborted`.
        """
        if isinstance(found, Aborted):
            raise by_name(found.error, found.reason)
        try:
            await committing.check_outrun(self.backend, found.attempt)
        except (BackendError, CorruptCheckpoint) as error:
            raise OutcomeUnknown(
                f"{found.slot} was committed, but whether a newer run leaves it out cannot be read: {error}"
            ) from error
        return {
            "bytes_state": found.bytes_state,
            "bytes_written": found.bytes_written,
            "bytes_deduplicated": found.bytes_state - found.bytes_written,
            "durability": self.backend.capabilities.durability,
        }

    async def know_base(self) -> None:
        """Learn, once, which chunks the checkpoint that the run resumed from has."""
        base, self._base = self._base, None
        if base is None:
            return
        try:
            found = await lineage.read_slot(self.backend, base)
            if isinstance(found, Commit):
                datas = [await self.backend.get(ref.key, limit=part_format.LIMIT) for ref in found.parts]
                parts = [part_format.decode(data, ref.key) for data, ref in zip(datas, found.parts, strict=True)]
                self.index.replace(parts)
        except (BackendError, CorruptCheckpoint) as error:
            log.warning("all chunks will be written anew, since those of %s cannot be known: %s", base, error)

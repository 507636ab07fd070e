"""Phase two of a save, as a straight line: compare, hash, drop what is stored, pack, upload, part, commit."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from backends.base import Backend
from backends.errors import AlreadyExists, BackendError, NoSpace

from ..errors import (
    CheckpointError,
    CorruptCheckpoint,
    OutcomeUnknown,
    ReplicaMismatch,
    SaveFailed,
    StorageFull,
    by_name,
)
from ..format import document
from ..format import part as part_format
from ..format.commit import Aborted, Commit, replica_mismatch
from ..format.keys import Attempt, Slot
from ..format.model import SliceKey
from ..format.part import Extent, Part, Witness
from ..repo import lineage
from . import commit as committing
from .index import ChunkIndex
from .pack import Packer, digest
from .submission import Submission, SubmittedValue

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
            work = _Work(self, submissions)
            try:
                async with asyncio.timeout_at(deadline):
                    return await work.run()
            except TimeoutError as error:
                failure: CheckpointError = SaveFailed(f"not durable within {timeout:g} s (TIMEOUT): {work.waiting()}")
                failure.__cause__ = error
            except NoSpace as error:
                failure = StorageFull(f"{error}; free space there, the next save will try again")
            except BackendError as error:
                failure = SaveFailed(str(error))
            except (ValueError, MemoryError, OSError) as error:
                failure = SaveFailed(f"{type(error).__name__}: {error}")
            except CorruptCheckpoint as error:
                failure = SaveFailed(str(error))
            except CheckpointError as error:
                failure = error
            return await work.give_up(failure)

    async def know_base(self) -> None:
        """Learn, once, which chunks the checkpoint that the run resumed from has."""
        base, self._base = self._base, None
        if base is None:
            return
        found = await lineage.read_slot(self.backend, base)
        if isinstance(found, Commit):
            datas = [await self.backend.get(ref.key, limit=part_format.LIMIT) for ref in found.parts]
            self.index.replace(part_format.decode(data, ref.key) for data, ref in zip(datas, found.parts, strict=True))


class _Work:
    """One attempt on this node."""

    def __init__(self, persister: Persister, submissions: Sequence[Submission]) -> None:
        self.persister, self.backend = persister, persister.backend
        self.submissions = sorted(submissions, key=lambda s: s.plan.rank)
        first = self.submissions[0]
        self.attempt: Attempt = first.attempt
        self.node, self.nodes = first.plan.node, first.plan.nodes
        self.packer = Packer(
            self.backend, self.attempt, self.node, persister.incarnation, persister.index, persister.pool
        )
        self.seen: dict[int, tuple[bytes, Part]] = {}
        self.own_intent = False

    async def run(self) -> dict[str, Any]:
        started = time.monotonic()
        await self.persister.know_base()
        await self._declare()
        self._agree()
        if not self.own_intent:
            await committing.look(self.backend, self.attempt, self.node, self.seen)
        if self.node not in self.seen:
            witnesses = await self._compare()
            extents = await self._store()
            part = Part(self._header(extents), extents, witnesses)
            self.seen[self.node] = await committing.write_part(self.backend, self.attempt, self.node, part)
        found = await committing.settle(self.backend, self.attempt, self.nodes, self.seen)
        if isinstance(found, Aborted):
            raise by_name(found.error, found.reason)
        self.persister.index.replace([self.seen[self.node][1]])
        await self._withdraw()
        await committing.check_outrun(self.backend, self.attempt)
        return {
            "bytes_state": found.bytes_state,
            "bytes_written": found.bytes_written,
            "bytes_deduplicated": found.bytes_state - found.bytes_written,
            "durability": self.backend.capabilities.durability,
            "upload_seconds": time.monotonic() - started,
        }

    def waiting(self) -> str:
        if self.node not in self.seen:
            return f"node {self.node} was still uploading"
        missing = [node for node in range(self.nodes) if node not in self.seen]
        return f"no part from nodes {missing}" if missing else "waiting for the commit"

    async def give_up(self, failure: CheckpointError) -> dict[str, Any]:
        """Fill the slot with `aborted`, delete what was written, and raise what the slot says in the end."""
        log.warning("%s: %s: %s", self.attempt.slot, type(failure).__name__, failure)
        if not isinstance(failure, SaveFailed | ReplicaMismatch):
            raise failure  # the slot is filled, or cannot be read
        try:
            async with asyncio.timeout(30):
                content = Aborted(self.attempt, type(failure).__name__, str(failure))
                found = await committing.fill(self.backend, content)
        except (BackendError, TimeoutError) as error:
            if self.node in self.seen:
                raise OutcomeUnknown(
                    f"{failure}; and whether {self.attempt.slot} stands cannot be read: {error}"
                ) from error
            found = Aborted(self.attempt, type(failure).__name__, str(failure))  # without our part there is no commit
        if isinstance(found, Commit):
            raise OutcomeUnknown(f"{self.attempt.slot} was committed, but {failure}") from failure
        await committing.discard(self.backend, list(self.packer.packs))
        await self._withdraw()
        raise by_name(found.error, found.reason) from failure

    async def _declare(self) -> None:
        """Publish, before anything is written or referenced, what this save will write and may reference."""
        body = {
            "slot": str(self.attempt.slot),
            "writes": [self.attempt.pack_prefix(self.node), str(self.attempt.part(self.node))],
            "references": sorted(self.persister.index.packs),
            "incarnation": self.persister.incarnation,
        }
        try:
            await self.backend.put_if_absent(self.attempt.intent(self.node), document.encode("intent", body))
            self.own_intent = True
        except AlreadyExists:  # an agent that died left it; it names the temporary objects of both, and stays
            self.own_intent = False

    async def _withdraw(self) -> None:
        if self.own_intent:
            await committing.discard(self.backend, [str(self.attempt.intent(self.node))])

    def _agree(self) -> None:
        first = self.submissions[0]
        for other in self.submissions:
            for what, ours, theirs in (
                ("step", first.attempt, other.attempt),
                ("plan", first.plan.fingerprint, other.plan.fingerprint),
            ):
                if ours != theirs:
                    ranks = f"ranks {first.plan.rank} and {other.plan.rank}"
                    raise SaveFailed(f"{ranks} differ in {what}: {ours} and {theirs}")

    async def _compare(self) -> list[Witness]:
        """Prove that this node's ranks hold the same; return what other nodes must agree with."""
        seen: dict[tuple[object, ...], tuple[bytes, int]] = {}
        witnesses: dict[SliceKey, Witness] = {}
        for submission in self.submissions:
            rank = submission.plan.rank
            digests = [(key, await self._in_pool(where), across) for key, where, across in _witnesses(submission)]
            for key, found, across in [*digests, *submission.digests]:
                expected, other = seen.setdefault(key.identity, (found, rank))
                if expected != found:
                    raise ReplicaMismatch(replica_mismatch(key.name, [other], [rank]))
                if across:
                    witnesses[key] = Witness(key, found)
        return list(witnesses.values())

    async def _in_pool(self, data: memoryview) -> bytes:
        if len(data) < 1 << 16:
            return digest(data)
        return await asyncio.get_running_loop().run_in_executor(self.persister.pool, digest, data)

    async def _store(self) -> list[Extent]:
        owned = [(s, chunk) for s in self.submissions for chunk in s.plan.chunks]
        blobs = [_values(s) for s in self.submissions]
        views = [s.read(chunk.offset, chunk.size) for s, chunk in owned]
        places = await self.packer.store([*views, *(memoryview(blob) for blob, _ in blobs if blob)])
        extents = [
            Extent(piece.key, piece.start, piece.length, piece.skip, place)
            for (_, chunk), place in zip(owned, places, strict=False)
            for piece in chunk.pieces
        ]
        values = [found for blob, found in blobs if blob]
        for found, place in zip(values, places[len(owned) :], strict=True):
            extents += [Extent(value.key, 0, value.length, skip, place) for value, skip in found]
        extents += [part_format.empty(key) for s in self.submissions for key in s.plan.empty]
        return extents

    def _header(self, extents: list[Extent]) -> dict[str, Any]:
        first = self.submissions[0]
        chunks = {(e.chunk.pack, e.chunk.offset): e.chunk for e in extents if e.chunk.pack}
        packs = {chunk.pack for chunk in chunks.values()}
        state = sum(chunk.size for s in self.submissions for chunk in s.plan.chunks)
        state += sum(len(_values(s)[0]) for s in self.submissions)
        return {
            "step": self.attempt.step,
            "run": self.attempt.run,
            "ordinal": self.attempt.ordinal,
            "generation": self.attempt.generation,
            "plan": first.plan.fingerprint,
            "world_size": first.plan.world_size,
            "node": self.node,
            "ranks": [s.plan.rank for s in self.submissions],
            "packs": self.persister.index.describe(packs, self.packer.packs),
            "layouts": first.plan.layouts,
            "bytes_state": state,
            "bytes_written": self.packer.bytes_written,
            "metrics": first.metrics,
            "pin": first.pin,
        }


def _witnesses(submission: Submission) -> Iterator[tuple[SliceKey, memoryview, bool]]:
    for witness in submission.plan.witnesses:
        yield witness.key, submission.read(witness.offset, witness.key.nbytes), witness.across
    for value in submission.values:
        if value.witness:
            yield value.key, submission.read(value.offset, value.length), value.across


def _values(submission: Submission) -> tuple[bytes, list[tuple[SubmittedValue, int]]]:
    """The values a rank owns, as one chunk, and where each lies in it; equal ones were submitted once."""
    blob = bytearray()
    at: dict[tuple[int, int], int] = {}
    found = []
    for value in submission.values:
        if value.owned:
            where = (value.offset, value.length)
            if where not in at:
                at[where] = len(blob)
                blob += submission.read(*where)
            found.append((value, at[where]))
    return bytes(blob), found

"""One attempt on one node, as a straight line: compare, hash, drop what is stored, pack, upload, part, commit."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from backends import errors as backend_errors
from backends.errors import AlreadyExists, BackendError

from ..errors import (
    CheckpointError,
    CorruptCheckpoint,
    OutcomeUnknown,
    ReplicaMismatch,
    SaveFailed,
    StorageFull,
    Superseded,
    by_name,
)
from ..format import document
from ..format import part as part_format
from ..format.commit import Aborted, Commit, replica_mismatch
from ..format.keys import Attempt
from ..format.model import SliceKey
from ..format.part import Extent, Part, Witness
from . import commit as committing
from .pack import Packer, digest
from .submission import Submission, SubmittedValue

if TYPE_CHECKING:
    from .persist import Persister

log = logging.getLogger("ckptstore.agent")

_GIVE_UP_SECONDS = 30  # past the deadline, to say that it has passed


class NodeSave:
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
        self.bytes_state = 0  #: of this node's chunks
        self.own_intent = False
        self.again = any(s.again for s in self.submissions)  #: an agent before this one may have got further
        self.part_begun = False

    async def run(self) -> dict[str, Any]:
        started = time.monotonic()
        await self.persister.know_base()
        await self._declare()
        self._agree()
        if self.attempt.generation:  # what it would replace may be what a newer run stands on
            try:
                await committing.check_outrun(self.backend, self.attempt)
            except Superseded as error:
                return await self.give_up(error)
        if not self.own_intent:
            await committing.look(self.backend, self.attempt, self.node, self.seen)
        if self.node not in self.seen:
            witnesses = await self._compare()
            extents = await self._store()
            part = Part(self._header(extents), extents, witnesses)
            self.part_begun = True
            self.seen[self.node] = await committing.write_part(self.backend, self.attempt, self.node, part)
        self._check_own_part()
        found = await committing.settle(self.backend, self.attempt, self.nodes, self.seen)
        return {**await self._finish(found), "upload_seconds": time.monotonic() - started}

    async def _finish(self, found: Commit | Aborted) -> dict[str, Any]:
        if isinstance(found, Commit):
            if self.node in self.seen:
                self.persister.index.replace([self.seen[self.node][1]])
            await self._withdraw()
        return await self.persister.conclude(found)

    def _check_own_part(self) -> None:
        """The part that counts may be a predecessor's, which must have been of the same save."""
        header, run_id = self.seen[self.node][1].header, self.submissions[0].run_id
        if (header.get("run_id"), header.get("step")) != (run_id, self.attempt.step):
            self.part_begun = False  # so it is not ours to delete
            raise SaveFailed(f"{self.attempt.part(self.node)} is another save's: somebody has deleted from this store")

    def waiting(self) -> str:
        if self.node not in self.seen:
            return f"node {self.node} was still uploading"
        missing = [node for node in range(self.nodes) if node not in self.seen]
        return f"no part from nodes {missing}" if missing else "waiting for the commit"

    async def give_up(self, failure: CheckpointError) -> dict[str, Any]:
        """Fill the slot with `aborted`, delete what was written, and end as the slot says: it may be a commit."""
        log.warning("%s: %s: %s", self.attempt.slot, type(failure).__name__, failure)
        content = Aborted(self.attempt, type(failure).__name__, str(failure))
        found: Commit | Aborted | None = None
        try:
            async with asyncio.timeout(_GIVE_UP_SECONDS):
                found = await committing.fill(self.backend, content)
        except (BackendError, CorruptCheckpoint, TimeoutError) as error:
            if not self._alone(failure):
                raise OutcomeUnknown(
                    f"{failure}; and whether {self.attempt.slot} stands cannot be read: {error}"
                ) from error
        if isinstance(found, Commit):
            log.warning("%s: committed all the same", self.attempt.slot)
            return await self._finish(found)
        part = [str(self.attempt.part(self.node))] if self.part_begun else []  # first, since it names the packs
        await committing.discard(self.backend, [*part, *self.packer.packs])
        await self._withdraw()
        if found is None:
            await self._tell_others(content)
            found = content
        raise by_name(found.error, found.reason) from failure

    def _alone(self, failure: CheckpointError) -> bool:
        """Whether no commit can stand, or come from another agent, although the slot could not be filled."""
        if self.again:
            return False
        return not self.part_begun or (self.nodes == 1 and isinstance(failure, StorageFull))  # which has no effect

    async def _tell_others(self, content: Aborted) -> None:
        """Fill the slot once more, now that there may be room; failing that, other nodes wait for their deadline."""
        try:
            async with asyncio.timeout(_GIVE_UP_SECONDS):
                await committing.fill(self.backend, content)
        except (BackendError, CorruptCheckpoint, TimeoutError) as error:
            log.warning("%s stays empty: %s", self.attempt.slot, error)

    async def _declare(self) -> None:
        """Publish, before anything is written or referenced, what this save will write and may reference."""
        body = {
            "slot": str(self.attempt.slot),
            "writes": [self.attempt.pack_prefix(self.node), str(self.attempt.part(self.node))],
            "references": sorted(self.persister.index.packs),
            "incarnation": self.persister.incarnation,
        }
        key, data = self.attempt.intent(self.node), document.encode("intent", body)
        try:
            await self.backend.put_if_absent(key, data)
            self.own_intent = True
        except (AlreadyExists, backend_errors.OutcomeUnknown):
            # what an agent that died left stays, since it names the temporary objects of both
            self.own_intent = await self.backend.get(key, limit=document.LIMIT) == data

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
        views += [memoryview(blob) for blob, _ in blobs if blob]
        self.bytes_state = sum(map(len, views))
        places = await self.packer.store(views)
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
        packs = {extent.chunk.pack for extent in extents if extent.chunk.pack}
        return {
            "step": self.attempt.step,
            "run": self.attempt.run,
            "run_id": first.run_id,
            "ordinal": self.attempt.ordinal,
            "generation": self.attempt.generation,
            "plan": first.plan.fingerprint,
            "world_size": first.plan.world_size,
            "node": self.node,
            "ranks": [s.plan.rank for s in self.submissions],
            "packs": self.persister.index.describe(packs, self.packer.packs),
            "layouts": first.plan.layouts,
            "bytes_state": self.bytes_state,
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

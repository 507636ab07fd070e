"""Storage that fails: an attempt ends with a typed error or a commit, and never with both, whatever fails when."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest

from backends.errors import BackendError, NoSpace, OutcomeUnknown, Permanent, Transient
from backends.key import ObjectKey
from backends.memory import MemoryBackend
from backends.sharedmem import Segment
from backends.testing.faulty import FaultyBackend
from ckptstore import errors
from ckptstore.agent.persist import Persister
from ckptstore.agent.submission import Piece, PlannedChunk, RankPlan, Submission, SubmittedValue
from ckptstore.errors import CheckpointError
from ckptstore.format import keys
from ckptstore.format.commit import Aborted, Commit
from ckptstore.format.keys import Attempt
from ckptstore.format.model import SHARED, SliceKey, whole
from ckptstore.repo import lineage
from ckptstore.repo.lineage import Run, encode_run

SIZE = 100_000  # bytes of each of a rank's two tensors

WRITES = ("put", "put_if_absent", "delete")
Outcome = CheckpointError | None


class Backend(FaultyBackend):
    """Knows which calls came, in order: the operation and its key."""

    def __init__(self, name: str) -> None:
        super().__init__(MemoryBackend(name))
        self.calls: list[tuple[str, str]] = []

    async def _before(self, operation: str, key: ObjectKey | None) -> tuple[object, ...]:  # type: ignore[override]
        self.calls.append((operation, str(key)))
        return await super()._before(operation, key)


class Node:
    """A node of one rank, whose agent's backend fails on command."""

    def __init__(self, name: str, node: int, nodes: int, pool: ThreadPoolExecutor) -> None:
        self.backend, self.node, self.nodes = Backend(name), node, nodes
        self.persister = Persister(self.backend, f"{node:08x}", pool, 3600, None)

    async def save(self, ordinal: int) -> Outcome:
        """Save the step of this number; how it ended."""
        with Segment.create(2 * SIZE + 8, "test") as segment:
            try:
                async with asyncio.timeout(20):
                    await self.persister.save([self._submission(segment, ordinal)], 5)
            except CheckpointError as error:
                return error
        return None

    def _submission(self, segment: Segment, ordinal: int) -> Submission:
        segment.buffer[: 2 * SIZE] = bytes([ordinal * 2 + self.node]) * SIZE + bytes([100 + ordinal]) * SIZE
        segment.buffer[2 * SIZE :] = ordinal.to_bytes(8, "little")
        slices = [SliceKey(f"{name}{self.node}", SHARED, "uint8", (SIZE,), whole((SIZE,))) for name in "ab"]
        chunks = tuple(PlannedChunk(i * SIZE, SIZE, (Piece(key, 0, SIZE, 0),)) for i, key in enumerate(slices))
        plan = RankPlan("plan", self.node, self.nodes, self.node, self.nodes, (self.node,), chunks, (), ())
        shared = self.nodes > 1
        step = SubmittedValue("step", SHARED, 2 * SIZE, 8, self.node == 0, shared, shared)
        return Submission(plan, attempt(ordinal), segment, [step], [], None, False)


def attempt(ordinal: int) -> Attempt:
    return Attempt(1, ordinal, 10 * ordinal, 0)


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


async def new_store(nodes: int, pool: ThreadPoolExecutor) -> tuple[MemoryBackend, list[Node]]:
    name = uuid.uuid4().hex
    plain = MemoryBackend(name)
    await plain.put_if_absent(keys.run_key(1), encode_run(Run(1, "first", None)))
    return plain, [Node(name, node, nodes, pool) for node in range(nodes)]


async def check_end(plain: MemoryBackend, ordinal: int, outcomes: list[Outcome], failed_at: str) -> None:
    """What the nodes were told is what the slot says, and nothing is left of an attempt that failed."""
    found = await lineage.read_slot(plain, attempt(ordinal).slot)
    if failed_at.startswith("runs"):  # after the commit: whether a newer run leaves it out is not to be known
        assert isinstance(found, Commit) and isinstance(outcomes[0], errors.OutcomeUnknown | None)
        outcomes = [None, *outcomes[1:]]
    assert len({type(outcome) for outcome in outcomes}) == 1, outcomes
    if outcomes[0] is None:
        assert isinstance(found, Commit), found
    else:
        assert isinstance(outcomes[0], errors.SaveFailed), repr(outcomes[0])
        assert isinstance(found, Aborted), found
        left = [str(info.key) async for info in plain.list() if info.key.segments[0] in ("packs", "parts")]
        assert not [key for key in left if f"/{ordinal:06d}/" in key], left


def kinds(operation: str) -> list[tuple[type[BackendError] | Exception, bool]]:
    """What can go wrong in a call: the error, and whether it comes after the effect."""
    before: list[tuple[type[BackendError] | Exception, bool]] = [(Transient, False), (RuntimeError("a bug"), False)]
    if operation in WRITES:
        before += [(NoSpace, False), (Permanent, False), (OutcomeUnknown, False), (OutcomeUnknown, True)]
    return before


@pytest.mark.parametrize("nodes", [1, 2])
async def test_each_call_in_turn_fails_once(nodes: int, pool: ThreadPoolExecutor) -> None:
    outcomes: set[type[Outcome]] = set()
    for call in count(1):
        operation = key = None
        for kind in count():
            plain, cluster = await new_store(nodes, pool)
            backend = cluster[0].backend
            if operation is None or key is None:
                fault = backend.inject("*", call=call, error=Transient)
            elif kind < len(kinds(operation)):
                error, after = kinds(operation)[kind]
                fault = backend.inject("*", call=call, error=error, after=after)
            else:
                break
            ended = await asyncio.gather(*(node.save(1) for node in cluster))
            if not fault.fired:  # the attempt has no so many calls
                assert call > 5 and ended == [None] * nodes
                break
            operation, key = backend.calls[call - 1]
            try:
                await check_end(plain, 1, ended, key)
                assert await asyncio.gather(*(node.save(2) for node in cluster)) == [None] * nodes, "the next save"
            except AssertionError as failed:
                failed.add_note(f"call {call}, {operation} of {key}, fails with {fault.error}, after: {fault.after}")
                raise
            outcomes |= {type(outcome) for outcome in ended}
        if not fault.fired:
            break
    assert {type(None), errors.SaveFailed, errors.StorageFull} <= outcomes


@pytest.mark.parametrize("error", [Transient, NoSpace])
async def test_storage_goes_away_for_good(error: type[BackendError], pool: ThreadPoolExecutor) -> None:
    outcomes = []
    for call in count(1):
        plain, (node,) = await new_store(1, pool)
        faults = [node.backend.inject("*", call=late, error=error) for late in range(call, call + 100)]
        outcome = await node.save(1)
        if not faults[0].fired:
            break
        found = await lineage.read_slot(plain, attempt(1).slot)
        assert isinstance(outcome, CheckpointError | None)
        if not isinstance(outcome, errors.OutcomeUnknown):
            assert isinstance(found, Commit) == (outcome is None), (call, outcome)
        outcomes.append(type(outcome))
    assert outcomes[0] is (errors.StorageFull if error is NoSpace else errors.SaveFailed)
    assert errors.OutcomeUnknown in outcomes


async def test_a_full_disk_that_takes_not_even_the_word_aborted(pool: ThreadPoolExecutor) -> None:
    plain, (node,) = await new_store(1, pool)
    from_the_part_on = (2, 3, 4, 5)
    faults = [node.backend.inject("put_if_absent", call=call, error=NoSpace) for call in from_the_part_on]
    outcome = await node.save(1)
    assert isinstance(outcome, errors.StorageFull), repr(outcome)
    assert faults[0].fired and await lineage.read_slot(plain, attempt(1).slot) is None
    assert [str(info.key) async for info in plain.list()] == ["runs/000001.json"]
    for fault in faults:
        fault.call = 0
    assert await node.save(2) is None


async def test_a_plan_that_cannot_be(pool: ThreadPoolExecutor) -> None:
    plain, (node,) = await new_store(1, pool)
    with Segment.create(4096, "short") as segment:
        wide = Segment.create(2 * SIZE + 8, "wide")
        submission = node._submission(wide, 1)
        wide.close()
        submission.segment = segment
        with pytest.raises(errors.SaveFailed, match="of a segment of 4096"):
            await node.persister.save([submission], 5)
    assert isinstance(await lineage.read_slot(plain, attempt(1).slot), Aborted)
    assert await node.save(2) is None


async def test_a_deadline_names_the_node_that_is_late(pool: ThreadPoolExecutor) -> None:
    plain, (node, _) = await new_store(2, pool)
    late = pytest.raises(errors.SaveFailed, match=r"no part from nodes \[1\]")
    with Segment.create(2 * SIZE + 8, "test") as segment, late:
        await node.persister.save([node._submission(segment, 1)], 0.3)
    assert isinstance(await lineage.read_slot(plain, attempt(1).slot), Aborted)

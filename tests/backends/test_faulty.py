"""The fault injector keeps the promise while no fault is injected, and strikes exactly where it is told to."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import TYPE_CHECKING

import pytest

from backends import Backend, NotFound, ObjectKey, OutcomeUnknown, Permanent, Transient
from backends.memory import MemoryBackend
from backends.testing.conformance import BackendConformance, keys, stream
from backends.testing.faulty import OPERATIONS, FaultyBackend, flip, truncate

if TYPE_CHECKING:
    from collections.abc import Callable

A = ObjectKey("a")
_numbers = count()


class TestFaultyWithoutFaults(BackendConformance):
    @pytest.fixture
    def name(self) -> str:
        return f"faulty-{next(_numbers)}"

    @pytest.fixture
    def backend(self, name: str) -> Backend:
        return FaultyBackend(MemoryBackend(name))

    @pytest.fixture
    def reopen(self, name: str) -> Callable[[], Backend]:
        return lambda: FaultyBackend(MemoryBackend(name))


@pytest.fixture
def faulty() -> FaultyBackend:
    return FaultyBackend(MemoryBackend(f"faulty-{next(_numbers)}"))


async def call(backend: Backend, operation: str) -> object:
    if operation == "list":
        return await keys(backend)
    calls: dict[str, Callable[[], object]] = {
        "get": lambda: backend.get(A),
        "get_range": lambda: backend.get_range(A, 0, 3),
        "get_range_into": lambda: backend.get_range_into(A, 0, memoryview(bytearray(3))),
        "put": lambda: backend.put(ObjectKey("b"), stream(b"new")),
        "put_if_absent": lambda: backend.put_if_absent(ObjectKey("b"), b"new"),
        "stat": lambda: backend.stat(A),
        "delete": lambda: backend.delete(A),
    }
    return await calls[operation]()  # type: ignore[misc]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("after", [False, True])
async def test_every_operation_can_fail(faulty: FaultyBackend, operation: str, after: bool) -> None:
    await faulty.inner.put_if_absent(A, b"old")
    fault = faulty.inject(operation, error=Transient, after=after)
    with pytest.raises(Transient, match=f"call 1 of {operation}"):
        await call(faulty, operation)
    assert fault.fired
    effects = {"put": ["a", "b"], "put_if_absent": ["a", "b"], "delete": []}
    assert await keys(faulty.inner) == (effects.get(operation, ["a"]) if after else ["a"])
    if operation not in effects or not after:
        await call(faulty, operation)  # once is enough


async def test_only_the_named_call_fails(faulty: FaultyBackend) -> None:
    await faulty.put_if_absent(A, b"x")
    await faulty.get(A)
    faulty.inject("get", call=3, error=Permanent)
    await faulty.get(A)
    await faulty.stat(A)
    await faulty.get(A)
    with pytest.raises(Permanent):
        await faulty.get(A)
    await faulty.get(A)


async def test_any_operation(faulty: FaultyBackend) -> None:
    fault = faulty.inject("*", call=2, error=OutcomeUnknown, after=True)
    with pytest.raises(NotFound):
        await faulty.stat(A)
    with pytest.raises(OutcomeUnknown):
        await faulty.put_if_absent(A, b"x")
    assert fault.fired
    assert await faulty.get(A) == b"x"


async def test_error_of_ones_own(faulty: FaultyBackend) -> None:
    mine = RuntimeError("mine")
    faulty.inject("stat", error=mine)
    with pytest.raises(RuntimeError) as caught:
        await faulty.stat(A)
    assert caught.value is mine


async def test_damaged_reads(faulty: FaultyBackend) -> None:
    await faulty.put_if_absent(A, b"abc")
    for operation in ("get", "get_range", "get_range_into"):
        faulty.inject(operation, damage=flip(1))
        faulty.inject(operation, call=2, damage=truncate(1))
    buffer = bytearray(3)
    assert await faulty.get(A) == b"a\x9dc"
    assert await faulty.get(A) == b"a"
    assert await faulty.get_range(A, 0, 3) == b"a\x9dc"
    assert await faulty.get_range(A, 0, 3) == b"a"
    await faulty.get_range_into(A, 0, memoryview(buffer))
    assert buffer == b"a\x9dc"
    await faulty.get_range_into(A, 0, memoryview(buffer))
    assert buffer == b"a\0\0"
    assert all(fault.fired for fault in faulty.faults)
    assert await faulty.get(A) == b"abc"


async def test_delay(faulty: FaultyBackend) -> None:
    await faulty.put_if_absent(A, b"abc")
    fault = faulty.inject("get", delay=3600)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(faulty.get(A), 0.01)
    assert fault.fired


async def test_a_fault_that_never_came_says_so(faulty: FaultyBackend) -> None:
    fault = faulty.inject("get", call=5, error=Transient)
    with pytest.raises(NotFound):
        await faulty.get(A)
    assert not fault.fired


async def test_counts(faulty: FaultyBackend) -> None:
    await faulty.put(A, stream(b"abc", b"de"))
    await faulty.put_if_absent(ObjectKey("b"), b"1234567")
    await faulty.get(A)
    await faulty.get_range(A, 1, 2)
    await faulty.get_range_into(A, 1, memoryview(bytearray(3)))
    await keys(faulty)
    assert faulty.counts == {
        "put": 1,
        "put_if_absent": 1,
        "get": 1,
        "get_range": 1,
        "get_range_into": 1,
        "list": 1,
        "calls": 6,
        "bytes_written": 12,
        "bytes_read": 10,
    }


def test_unknown_operation(faulty: FaultyBackend) -> None:
    with pytest.raises(ValueError, match="read"):
        faulty.inject("read", error=Transient)

"""The memory backend keeps the promise, across threads with event loops of their own."""

from __future__ import annotations

import asyncio
import threading
from itertools import count
from typing import TYPE_CHECKING

import pytest

from backends import AlreadyExists, Backend, ObjectKey, open_backend
from backends.memory import MemoryBackend
from backends.testing.conformance import BackendConformance

if TYPE_CHECKING:
    from collections.abc import Callable

_numbers = count()


class TestMemory(BackendConformance):
    @pytest.fixture
    def name(self) -> str:
        return f"test-{next(_numbers)}"

    @pytest.fixture
    def backend(self, name: str) -> Backend:
        return MemoryBackend(name)

    @pytest.fixture
    def reopen(self, name: str) -> Callable[[], Backend]:
        return lambda: MemoryBackend(name)


async def test_one_namespace_per_name() -> None:
    await open_backend("memory://one").put_if_absent(ObjectKey("a"), b"1")
    assert await open_backend("memory://one/").get(ObjectKey("a")) == b"1"
    assert [info async for info in open_backend("memory://other").list()] == []


async def test_keeps_a_copy_of_what_it_is_given() -> None:
    backend, data = MemoryBackend("copies"), bytearray(b"before")
    await backend.put_if_absent(ObjectKey("a"), data)  # type: ignore[arg-type]
    data[:] = b"after!"
    assert await backend.get(ObjectKey("a")) == b"before"


def test_threads_with_their_own_loops() -> None:
    wins: list[int] = []

    async def claim_all(me: int) -> None:
        backend = MemoryBackend("threads")
        for number in range(500):
            try:
                await backend.put_if_absent(ObjectKey(f"slot/{number}"), str(me).encode())
            except AlreadyExists:
                continue
            wins.append(number)

    def run(me: int) -> None:
        asyncio.run(claim_all(me))

    threads = [threading.Thread(target=run, args=(me,)) for me in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(wins) == list(range(500))

"""Conformance: streams, and that objects are whole, stay, and have one writer."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import numpy as np
import pytest

from backends.errors import AlreadyExists, NotFound
from backends.key import ObjectKey

from .common import DATA, A, buffer, keys, stream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from backends.base import Backend


RACERS, ROUNDS = 8, 200


class WritingConformance:
    """What every backend must do for writers."""

    # Streams

    async def test_stream_of_many_buffers(self, backend: Backend) -> None:
        parts = [os.urandom(size % 97) for size in range(3000)]
        assert await backend.put(A, stream(*parts)) == sum(map(len, parts))
        assert await backend.get(A) == b"".join(parts)

    async def test_stream_of_empty_buffers(self, backend: Backend) -> None:
        assert await backend.put(
            A, stream(b"", DATA, b"", memoryview(b""), buffer(np.empty((0, 3))), DATA, b"")
        ) == 2 * len(DATA)
        assert await backend.get(A) == DATA * 2

    async def test_stream_of_mixed_sizes(self, backend: Backend) -> None:
        parts = [os.urandom(size) for size in (1, 3 << 20, 2, 300_000, 5, 6, 1 << 20, 0, 7)]
        await backend.put(A, stream(*parts))
        assert await backend.get(A) == b"".join(parts)

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    async def test_kinds_of_buffers(self, backend: Backend, kind: type) -> None:
        await backend.put(A, stream(kind(DATA), kind(DATA)))
        assert await backend.get(A) == DATA * 2

    async def test_arrays_as_buffers(self, backend: Backend) -> None:
        parts = (np.arange(6, dtype=np.int16).reshape(2, 3), np.array(7), np.arange(5)[2:])
        await backend.put(A, stream(*[buffer(part) for part in parts]))
        assert await backend.get(A) == b"".join(part.tobytes() for part in parts)

    async def test_scattered_array_is_refused(self, backend: Backend) -> None:
        with pytest.raises(TypeError):
            await backend.put(A, stream(buffer(np.arange(10)[::2])))
        assert await keys(backend) == []

    async def test_a_part_may_be_reused(self, backend: Backend) -> None:
        async def reusing() -> AsyncIterator[bytearray]:
            for size in (10, 400_000, 10, 20):
                part = bytearray(size)
                for value in range(3):
                    part[:] = bytes([value]) * size
                    yield part

        await backend.put(A, reusing())
        expected = (bytes([value]) * size for size in (10, 400_000, 10, 20) for value in range(3))
        assert await backend.get(A) == b"".join(expected)

    @pytest.mark.parametrize("before", [(), (DATA,), (bytes(2 << 20), DATA)])
    @pytest.mark.parametrize("error", [RuntimeError("mine"), OSError(28, "mine too"), asyncio.CancelledError("mine")])
    async def test_failing_stream_leaves_nothing(
        self, backend: Backend, before: tuple[bytes, ...], error: BaseException
    ) -> None:
        async def failing() -> AsyncIterator[bytes]:
            for part in before:
                yield part
            raise error

        with pytest.raises(type(error)) as caught:
            await backend.put(A, failing())
        assert caught.value is error
        await self.assert_free(backend)

    async def test_part_that_is_no_buffer_leaves_nothing(self, backend: Backend) -> None:
        with pytest.raises(TypeError):
            await backend.put(A, stream(DATA, "text"))  # type: ignore[arg-type]
        await self.assert_free(backend)

    @pytest.mark.parametrize("before", [(), (DATA,), (bytes(2 << 20), DATA)])
    async def test_cancelled_put_leaves_nothing(self, backend: Backend, before: tuple[bytes, ...]) -> None:
        waiting = asyncio.Event()

        async def stuck() -> AsyncIterator[bytes]:
            for part in before:
                yield part
            waiting.set()
            await asyncio.Event().wait()

        task = asyncio.create_task(backend.put(A, stuck()))
        await waiting.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await self.assert_free(backend)

    async def test_put_cancelled_anywhere_is_all_or_nothing(self, backend: Backend) -> None:
        for turns in range(30):
            key = ObjectKey(f"cancelled/{turns}")
            task = asyncio.create_task(backend.put(key, stream(bytes(1 << 20), DATA)))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait((task,))
            found = [info async for info in backend.list()]
            if found:
                assert [(info.key, info.size) for info in found] == [(key, (1 << 20) + len(DATA))]
                await backend.delete(key)

    async def test_an_object_is_not_seen_before_it_is_whole(self, backend: Backend) -> None:
        async def looking() -> AsyncIterator[bytes]:
            for _ in range(3):
                yield bytes(1 << 20)
                assert await keys(backend) == []
                with pytest.raises(NotFound):
                    await backend.stat(A)

        await backend.put(A, looking())
        assert await keys(backend) == [A.path]

    # Never overwriting

    async def test_put_never_replaces(self, backend: Backend) -> None:
        await backend.put(A, stream(DATA))
        with pytest.raises(AlreadyExists, match="folder/object"):
            await backend.put(A, stream(b"other"))
        assert await backend.get(A) == DATA
        assert await keys(backend) == [A.path]

    async def test_put_if_absent_never_replaces(self, backend: Backend) -> None:
        await backend.put_if_absent(A, DATA)
        for other in (b"other", DATA, b""):
            with pytest.raises(AlreadyExists) as caught:
                await backend.put_if_absent(A, other)
            assert caught.value.key == A
        assert await backend.get(A) == DATA

    async def test_neither_replaces_the_other(self, backend: Backend) -> None:
        await backend.put_if_absent(A, DATA)
        with pytest.raises(AlreadyExists):
            await backend.put(A, stream(b"other"))
        await backend.put(ObjectKey("b"), stream(DATA))
        with pytest.raises(AlreadyExists):
            await backend.put_if_absent(ObjectKey("b"), b"other")
        assert await backend.get(A) == await backend.get(ObjectKey("b")) == DATA

    async def test_an_empty_object_is_not_replaced_either(self, backend: Backend) -> None:
        await backend.put_if_absent(A, b"")
        with pytest.raises(AlreadyExists):
            await backend.put_if_absent(A, DATA)
        assert await backend.get(A) == b""

    async def test_put_overtaken_while_streaming(self, backend: Backend, reopen: Callable[[], Backend]) -> None:
        other = reopen()

        async def overtaken() -> AsyncIterator[bytes]:
            yield b"slow"
            await other.put_if_absent(A, DATA)
            yield b"er"

        with pytest.raises(AlreadyExists):
            await backend.put(A, overtaken())
        assert await backend.get(A) == DATA
        assert await keys(backend) == [A.path]

    async def test_racing_put_if_absent(self, backend: Backend, reopen: Callable[[], Backend]) -> None:
        handles = [backend, *(reopen() for _ in range(RACERS - 1))]
        for number in range(ROUNDS):
            key = ObjectKey(f"races/{number}")
            claims = [f"{number} {racer}".encode() for racer in range(RACERS)]
            results = await asyncio.gather(
                *(handle.put_if_absent(key, claim) for handle, claim in zip(handles, claims, strict=True)),
                return_exceptions=True,
            )
            winners = [claim for claim, result in zip(claims, results, strict=True) if result is None]
            assert [await backend.get(key)] == winners
            assert sum(isinstance(result, AlreadyExists) for result in results) == RACERS - 1

    async def test_racing_put(self, backend: Backend, reopen: Callable[[], Backend]) -> None:
        handles = [backend, *(reopen() for _ in range(RACERS - 1))]
        for number in range(20):
            key = ObjectKey(f"races/{number}")
            claims = [bytes([racer]) * 10_000 for racer in range(RACERS)]
            results = await asyncio.gather(
                *(handle.put(key, stream(claim)) for handle, claim in zip(handles, claims, strict=True)),
                return_exceptions=True,
            )
            winners = [claim for claim, result in zip(claims, results, strict=True) if result == len(claim)]
            assert [await backend.get(key)] == winners
            assert sum(isinstance(result, AlreadyExists) for result in results) == RACERS - 1
        assert len(await keys(backend)) == 20

    async def assert_free(self, backend: Backend) -> None:
        """Nothing is stored, and the name can still be written."""
        assert await keys(backend) == []
        await backend.put_if_absent(A, DATA)
        assert await backend.get(A) == DATA

"""Conformance: objects, ranges, limits, and reads of what is not there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from backends.errors import NotFound, Permanent, Truncated
from backends.key import ObjectKey

from .common import DATA, A, buffer, keys, stream

if TYPE_CHECKING:
    from collections.abc import Callable

    from backends.base import Backend


LARGE = 64 << 20


class ReadingConformance:
    """What every backend must do for readers."""

    # Whole objects

    async def test_put_then_get(self, backend: Backend) -> None:
        assert await backend.put(A, stream(DATA)) == len(DATA)
        assert await backend.get(A) == DATA

    async def test_get_gives_bytes(self, backend: Backend) -> None:
        await backend.put(A, stream(DATA))
        assert type(await backend.get(A)) is bytes

    async def test_put_if_absent_then_get(self, backend: Backend) -> None:
        await backend.put_if_absent(A, DATA)
        assert await backend.get(A) == DATA

    async def test_another_handle_sees_it(self, backend: Backend, reopen: Callable[[], Backend]) -> None:
        await backend.put(A, stream(DATA))
        other = reopen()
        assert await other.get(A) == DATA
        assert await keys(other) == [A.path]

    async def test_object_at_the_top(self, backend: Backend) -> None:
        await backend.put_if_absent(ObjectKey("top.json"), DATA)
        assert await keys(backend) == ["top.json"]
        assert await backend.get(ObjectKey("top.json")) == DATA

    async def test_empty_object(self, backend: Backend) -> None:
        await backend.put_if_absent(A, b"")
        assert await backend.get(A) == b""
        assert bytes(await backend.get_range(A, 0, 0)) == b""
        assert (await backend.stat(A)).size == 0

    async def test_empty_stream_is_an_empty_object(self, backend: Backend) -> None:
        assert await backend.put(A, stream()) == 0
        assert await backend.get(A) == b""

    async def test_large_object(self, backend: Backend) -> None:
        block = np.arange(LARGE // 32, dtype=np.uint32)  # an eighth of it
        assert await backend.put(A, stream(*[buffer(block)] * 8)) == LARGE
        assert await backend.get(A, limit=LARGE) == block.tobytes() * 8
        middle = bytes(await backend.get_range(A, LARGE // 8 - 10, 20))
        assert middle == block.tobytes()[-10:] + block.tobytes()[:10]

    # Missing objects

    async def test_get_of_a_missing_object(self, backend: Backend) -> None:
        with pytest.raises(NotFound, match="folder/object"):
            await backend.get(A)

    async def test_get_range_of_a_missing_object(self, backend: Backend) -> None:
        with pytest.raises(NotFound, match="folder/object"):
            await backend.get_range(A, 0, 0)

    async def test_get_range_into_of_a_missing_object(self, backend: Backend) -> None:
        with pytest.raises(NotFound, match="folder/object"):
            await backend.get_range_into(A, 0, memoryview(bytearray(1)))

    async def test_stat_of_a_missing_object(self, backend: Backend) -> None:
        with pytest.raises(NotFound, match="folder/object"):
            await backend.stat(A)

    async def test_delete_of_a_missing_object(self, backend: Backend) -> None:
        with pytest.raises(NotFound, match="folder/object"):
            await backend.delete(A)

    async def test_missing_beside_others(self, backend: Backend) -> None:
        await backend.put(A, stream(DATA))
        with pytest.raises(NotFound) as caught:
            await backend.get(ObjectKey("folder/other"))
        assert caught.value.key == ObjectKey("folder/other")

    async def test_a_folder_is_no_object(self, backend: Backend) -> None:
        await backend.put(A, stream(DATA))
        folder = ObjectKey("folder")
        for call in (
            backend.get(folder),
            backend.stat(folder),
            backend.delete(folder),
            backend.get_range(folder, 0, 0),
        ):
            with pytest.raises(NotFound):
                await call
        assert await keys(backend) == [A.path]

    async def test_reading_makes_nothing(self, backend: Backend) -> None:
        with pytest.raises(NotFound):
            await backend.get(A)
        assert await keys(backend) == []

    # Ranges

    @pytest.mark.parametrize("start", [0, 1, 512, len(DATA) - 1, len(DATA)])
    @pytest.mark.parametrize("length", [0, 1, 255, 512, len(DATA)])
    async def test_ranges(self, backend: Backend, start: int, length: int) -> None:
        await backend.put(A, stream(DATA))
        target = bytearray(length)
        if start + length <= len(DATA):
            assert bytes(await backend.get_range(A, start, length)) == DATA[start : start + length]
            await backend.get_range_into(A, start, memoryview(target))
            assert target == DATA[start : start + length]
        else:
            for call in (backend.get_range(A, start, length), backend.get_range_into(A, start, memoryview(target))):
                with pytest.raises(Truncated, match=rf"truncated.*{start + length}\b.*{len(DATA)}\b"):
                    await call

    async def test_range_far_beyond_the_end(self, backend: Backend) -> None:
        await backend.put(A, stream(DATA))
        with pytest.raises(Permanent, match="truncated"):
            await backend.get_range(A, 1 << 50, 1 << 50)
        with pytest.raises(Permanent, match="truncated"):
            await backend.get_range(A, len(DATA) + 1, 0)

    async def test_negative_ranges(self, backend: Backend) -> None:
        await backend.put(A, stream(DATA))
        for start, length in ((-1, 1), (0, -1)):
            with pytest.raises(ValueError, match="-1"):
                await backend.get_range(A, start, length)
        with pytest.raises(ValueError, match="-1"):
            await backend.get_range_into(A, -1, memoryview(bytearray(1)))

    async def test_range_into_an_array(self, backend: Backend) -> None:
        numbers = np.arange(100, dtype=np.float64)
        await backend.put(A, stream(buffer(numbers)))
        target = np.zeros((5, 10))
        await backend.get_range_into(A, 8 * 20, memoryview(buffer(target)))
        assert (target.ravel() == numbers[20:70]).all()

    async def test_range_into_part_of_a_buffer(self, backend: Backend) -> None:
        await backend.put(A, stream(DATA))
        target = bytearray(30)
        await backend.get_range_into(A, 5, memoryview(target)[10:20])
        assert target == bytes(10) + DATA[5:15] + bytes(10)

    # Limits

    async def test_get_up_to_the_limit(self, backend: Backend) -> None:
        await backend.put(A, stream(DATA))
        assert await backend.get(A, limit=len(DATA)) == DATA

    async def test_get_beyond_the_limit(self, backend: Backend) -> None:
        await backend.put(A, stream(DATA))
        with pytest.raises(Permanent, match=rf"folder/object.*{len(DATA)}\b.*{len(DATA) - 1}\b"):
            await backend.get(A, limit=len(DATA) - 1)

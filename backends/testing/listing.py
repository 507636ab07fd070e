"""Conformance: names, listing, deleting, and many callers at once."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING

import pytest

from backends.errors import BackendError, NotFound
from backends.key import InvalidKey, ObjectKey

from .common import DATA, A, keys, stream

if TYPE_CHECKING:
    from collections.abc import Callable

    from backends.base import Backend


MANY = 10_000

ODD_NAMES = (
    "a b", " leading and trailing ", "ünïcödé/日本語/🙂", "e\u0301/é", "a.b", ".hidden", "...", "..a/a..", "~", "-rf",
    "a:b@c", "a*b?c[d]", "$HOME", "100%", "%2e%2e", "a+b&c=d#e", "'\"`", "a.tmp.x", "tmp",
    "x" * 200, "/".join(["y" * 99] * 10), "\u2028",
)  # fmt: skip
REFUSED_NAMES = ("", "/", "/a", "a/", "a//b", ".", "..", "a/../b", "a/./b", "../a", "a\\b", "a\0b", "a\nb", "a\x7f",
                 "a\x9f", "x" * 201, "é" * 101, "a/" * 500 + "a", "a.tmp", "a.tmp/b", ".tmp", "\ud800")  # fmt: skip


class ListingConformance:
    """What every backend must do with many objects and many callers."""

    # Names
    @pytest.mark.parametrize("name", ODD_NAMES)
    async def test_odd_names(self, backend: Backend, name: str) -> None:
        key = ObjectKey(name)
        await backend.put_if_absent(key, DATA)
        assert await backend.get(key) == DATA
        assert await keys(backend) == [name]
        await backend.delete(key)
        assert await keys(backend) == []

    async def test_odd_names_together(self, backend: Backend) -> None:
        for name in ODD_NAMES:
            await backend.put(ObjectKey(name), stream(name.encode()))
        assert await keys(backend) == sorted(ODD_NAMES)
        for name in ODD_NAMES:
            assert await backend.get(ObjectKey(name)) == name.encode()

    @pytest.mark.parametrize("name", REFUSED_NAMES)
    def test_refused_names(self, name: str) -> None:
        with pytest.raises(InvalidKey):
            ObjectKey(name)

    # Listing

    async def test_list_of_an_empty_store(self, backend: Backend) -> None:
        assert await keys(backend) == []

    async def test_list_of_a_missing_folder(self, backend: Backend) -> None:
        await backend.put_if_absent(A, DATA)
        assert await keys(backend, "missing/deep") == []

    async def test_list_is_recursive_and_sorted(self, backend: Backend) -> None:
        names = ["a", "a-b/x", "a.b", "a0", "b/c/d/e", "b/c.d", "b/c/d.e", "b-", "é/x", "z", "Z", "b0/x", "b/c!"]
        for name in names:
            await backend.put_if_absent(ObjectKey(name), b"")
        assert await keys(backend) == sorted(names)

    async def test_prefix_is_a_folder(self, backend: Backend) -> None:
        for name in ("ab/x", "a/b/x", "a/y", "a.z", "b/a/x"):
            await backend.put_if_absent(ObjectKey(name), b"")
        assert await keys(backend, "a") == ["a/b/x", "a/y"]
        assert await keys(backend, "a/b") == ["a/b/x"]
        assert await keys(backend, "ab") == ["ab/x"]

    async def test_prefix_that_is_an_object(self, backend: Backend) -> None:
        await backend.put_if_absent(A, b"")
        assert await keys(backend, A.path) == []

    async def test_list_gives_sizes_and_times(self, backend: Backend) -> None:
        await backend.put_if_absent(A, DATA)
        await backend.put_if_absent(ObjectKey("b"), b"")
        infos = [info async for info in backend.list()]
        assert [(info.key.path, info.size) for info in infos] == [("b", 0), (A.path, len(DATA))]
        assert infos[1] == await backend.stat(A)

    async def test_list_of_many(self, backend: Backend) -> None:
        names = [f"many/{number % 10}/{number:05}" for number in range(MANY)]
        for start in range(0, MANY, 500):
            await asyncio.gather(*(backend.put_if_absent(ObjectKey(name), b"x") for name in names[start : start + 500]))
        assert await keys(backend) == sorted(names)
        assert await keys(backend, "many/3") == sorted(name for name in names if name.startswith("many/3/"))

    async def test_list_left_early(self, backend: Backend) -> None:
        for number in range(10):
            await backend.put_if_absent(ObjectKey(f"{number}/x"), b"")
        async for info in backend.list():
            assert info.key.path == "0/x"
            break
        assert len(await keys(backend)) == 10

    async def test_list_while_deleting(self, backend: Backend) -> None:
        for number in range(10):
            await backend.put_if_absent(ObjectKey(f"{number}/x"), b"")
        seen = []
        async for info in backend.list():
            seen.append(info.key.path)
            await backend.delete(info.key)
        assert seen == [f"{number}/x" for number in range(10)]
        assert await keys(backend) == []

    # stat and delete

    async def test_stat(self, backend: Backend) -> None:
        await backend.put(A, stream(DATA))
        info = await backend.stat(A)
        assert (info.key, info.size) == (A, len(DATA))
        assert info == await backend.stat(A)

    async def test_times_are_seconds_since_the_epoch(self, backend: Backend) -> None:
        await backend.put_if_absent(A, DATA)
        assert abs((await backend.stat(A)).modified - time.time()) < 3600  # the store's clock, which may differ

    async def test_delete(self, backend: Backend) -> None:
        for name in ("a/x", "a/y", "b"):
            await backend.put_if_absent(ObjectKey(name), DATA)
        await backend.delete(ObjectKey("a/x"))
        assert await keys(backend) == ["a/y", "b"]
        with pytest.raises(NotFound):
            await backend.get(ObjectKey("a/x"))
        with pytest.raises(NotFound):
            await backend.delete(ObjectKey("a/x"))

    async def test_a_deleted_name_is_free_again(self, backend: Backend) -> None:
        for content in (b"first", b"second"):
            await backend.put_if_absent(A, content)
            assert await backend.get(A) == content
            await backend.delete(A)

    async def test_racing_deletes(self, backend: Backend, reopen: Callable[[], Backend]) -> None:
        handles = [backend, reopen()]
        for number in range(20):
            key = ObjectKey(f"deep/{number}/x")
            await backend.put_if_absent(key, DATA)
            results = await asyncio.gather(*(handle.delete(key) for handle in handles * 2), return_exceptions=True)
            assert sum(result is None for result in results) >= 1
            assert all(result is None or isinstance(result, NotFound) for result in results)
        assert await keys(backend) == []

    async def test_writers_beside_deleters(self, backend: Backend, reopen: Callable[[], Backend]) -> None:
        async def churn(handle: Backend, writer: int) -> None:
            for number in range(40):
                key = ObjectKey(f"shared/deep/{writer}-{number}")
                await handle.put_if_absent(key, DATA)
                assert await handle.get(key) == DATA
                await handle.delete(key)

        await asyncio.gather(churn(backend, 0), churn(reopen(), 1), churn(reopen(), 2))
        assert await keys(backend) == []

    # Concurrency and errors

    async def test_concurrent_readers(self, backend: Backend) -> None:
        content = os.urandom(1 << 20)
        await backend.put(A, stream(content))
        starts = range(0, 1 << 20, 1 << 14)
        pieces = await asyncio.gather(*(backend.get_range(A, start, 1 << 14) for start in starts))
        assert b"".join(pieces) == content
        wholes = await asyncio.gather(*(backend.get(A) for _ in range(32)))
        assert all(whole == content for whole in wholes)

    async def test_concurrent_writers_of_different_objects(self, backend: Backend) -> None:
        contents = {ObjectKey(f"{number % 7}/{number}"): os.urandom(number * 1000) for number in range(50)}
        await asyncio.gather(*(backend.put(key, stream(content)) for key, content in contents.items()))
        for key, content in contents.items():
            assert await backend.get(key) == content

    async def test_errors_are_backend_errors_that_name_the_key(self, backend: Backend) -> None:
        for call in (backend.get(A), backend.stat(A), backend.delete(A), backend.get_range(A, 0, 1)):
            with pytest.raises(BackendError) as caught:
                await call
            assert caught.value.key == A
            assert A.path in str(caught.value)
            assert caught.value.message

    async def test_capabilities(self, backend: Backend) -> None:
        assert backend.capabilities.durability in ("fsync", "replicated", "upload", "process")
        assert isinstance(backend.capabilities.conditional_put, bool)

    async def test_close_may_be_called_twice(self, reopen: Callable[[], Backend]) -> None:
        async with reopen() as handle:
            await handle.put_if_absent(A, DATA)
        await handle.close()

    async def test_objects_outlive_their_handle(self, backend: Backend, reopen: Callable[[], Backend]) -> None:
        async with reopen() as handle:
            await handle.put_if_absent(A, DATA)
        assert await backend.get(A) == DATA

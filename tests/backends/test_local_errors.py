"""What the local backend makes of a file system that misbehaves: each fault injected into one os call."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from typing import TYPE_CHECKING

import pytest

from backends import (
    AlreadyExists,
    Backend,
    BackendError,
    NoSpace,
    ObjectKey,
    OutcomeUnknown,
    Permanent,
    Transient,
    Truncated,
    posix,
)
from backends.local import LocalBackend
from backends.testing.conformance import DATA, keys, stream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

A = ObjectKey("folder/object")


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[Backend]:
    async with LocalBackend(str(tmp_path)) as backend:
        await backend.put_if_absent(ObjectKey("folder/other"), b"")
        yield backend
    assert not [name for name in os.listdir(tmp_path / "folder") if name.endswith(".tmp")]


class Failing:
    """An os function that fails with `number` at its `call`-th call, before or after it did its work."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, name: str, number: int, *, call: int = 1, after: bool = False
    ) -> None:
        self.original: Callable[..., object] = getattr(os, name)
        self.number, self.call, self.after, self.calls = number, call, after, 0
        monkeypatch.setattr(os, name, self)

    def __call__(self, *args: object, **kwargs: object) -> object:
        self.calls += 1
        if self.calls != self.call:
            return self.original(*args, **kwargs)
        if self.after:
            self.original(*args, **kwargs)
        raise OSError(self.number, os.strerror(self.number))


async def put(backend: Backend, kind: str) -> None:
    if kind == "put":
        await backend.put(A, stream(bytes(1 << 20), DATA))
    else:
        await backend.put_if_absent(A, DATA)


BOTH = pytest.mark.parametrize("kind", ["put", "put_if_absent"])


@BOTH
@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENOSPC, NoSpace),
        (errno.EDQUOT, NoSpace),
        (errno.EIO, Transient),
        (errno.ESTALE, Transient),
        (errno.EROFS, Permanent),
        (errno.EACCES, Permanent),
        (errno.EFBIG, Permanent),
    ],
)
async def test_failing_fsync_of_the_file(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, kind: str, number: int, expected: type[BackendError]
) -> None:
    fsync = Failing(monkeypatch, "fsync", number)
    with pytest.raises(expected, match=f"folder/object.*{errno.errorcode[number]}") as caught:
        await put(backend, kind)
    assert type(caught.value) is expected
    assert caught.value.full == (expected is NoSpace)
    assert isinstance(caught.value.__cause__, OSError) and caught.value.__cause__.errno == number
    assert fsync.calls == 1
    assert await keys(backend) == ["folder/other"]
    await put(backend, kind)  # a new file: the failed fsync is forgotten


@BOTH
@pytest.mark.parametrize(("name", "call"), [("fsync", 2), ("unlink", 1)])
async def test_failing_after_the_name_appeared(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, kind: str, name: str, call: int
) -> None:
    Failing(monkeypatch, name, errno.EIO, call=call)
    with pytest.raises(OutcomeUnknown, match=r"folder/object.*read it back"):
        await put(backend, kind)
    assert await keys(backend) == [A.path, "folder/other"]


async def test_delete_that_may_not_last(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    await put(backend, "put")
    Failing(monkeypatch, "fsync", errno.EIO)
    with pytest.raises(OutcomeUnknown, match="removal"):
        await backend.delete(A)


@BOTH
@pytest.mark.parametrize("number", [errno.EEXIST, errno.EIO, errno.EPERM])
async def test_link_that_failed_but_was_made(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, kind: str, number: int
) -> None:
    """As a network file system does when the answer was lost and the request sent again."""
    link = Failing(monkeypatch, "link", number, after=True)
    await put(backend, kind)
    assert link.calls == 1
    assert await keys(backend) == [A.path, "folder/other"]


@BOTH
async def test_link_that_failed(backend: Backend, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    Failing(monkeypatch, "link", errno.EIO)
    with pytest.raises(Transient):
        await put(backend, kind)
    assert await keys(backend) == ["folder/other"]


@BOTH
@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP])
async def test_without_hard_links_rename(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, kind: str, number: int
) -> None:
    Failing(monkeypatch, "link", number)
    await put(backend, kind)
    assert await keys(backend) == [A.path, "folder/other"]
    assert len(await backend.get(A, limit=2 << 20)) == (await backend.stat(A)).size > 0


async def test_without_hard_links_rename_replaces_nothing(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = Failing(monkeypatch, "link", errno.EPERM)

    async def overtaken() -> AsyncIterator[bytes]:
        yield b"slow"
        (tmp_path / A.path).write_bytes(DATA)

    with pytest.raises(AlreadyExists):
        await backend.put(A, overtaken())
    assert link.calls == 1
    assert await backend.get(A) == DATA


@BOTH
@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS])
async def test_without_either_refuse(backend: Backend, monkeypatch: pytest.MonkeyPatch, kind: str, number: int) -> None:
    Failing(monkeypatch, "link", errno.EPERM)
    monkeypatch.setattr(posix, "_rename_without_replacing", lambda *_: number)
    with pytest.raises(Permanent, match="neither hard links nor"):
        await put(backend, kind)
    assert await keys(backend) == ["folder/other"]


@BOTH
async def test_folder_removed_under_our_hands(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Another process deletes the last object of the folder, and with it the folder, before our file is in it."""
    original = posix._exists
    removed: list[str] = []

    def exists(name: str, folder: int) -> bool:
        if not removed:
            os.unlink(tmp_path / "folder" / "other")
            os.rmdir(tmp_path / "folder")
            removed.append(name)
        return original(name, folder)

    monkeypatch.setattr(posix, "_exists", exists)
    await put(backend, kind)
    assert removed
    assert await keys(backend) == [A.path]


async def test_temporary_removed_under_our_hands(backend: Backend, tmp_path: Path) -> None:
    async def swept() -> AsyncIterator[bytes]:
        yield b"x"
        for name in os.listdir(tmp_path / "folder"):
            if name.endswith(".tmp"):
                os.unlink(tmp_path / "folder" / name)

    with pytest.raises(Transient, match="temporary"):
        await backend.put(A, swept())
    assert await keys(backend) == ["folder/other"]


async def test_short_writes(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.write
    monkeypatch.setattr(os, "write", lambda file, view: original(file, view[:100]))
    await backend.put_if_absent(A, DATA)
    assert await backend.get(A) == DATA


async def test_short_reads(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    await backend.put_if_absent(A, DATA)
    pread, preadv = os.pread, os.preadv
    monkeypatch.setattr(os, "pread", lambda file, size, at: pread(file, min(size, 100), at))
    monkeypatch.setattr(os, "preadv", lambda file, views, at: preadv(file, [views[0][:100]], at))
    buffer = bytearray(len(DATA) - 1)
    await backend.get_range_into(A, 1, memoryview(buffer))
    assert await backend.get(A) == DATA
    assert await backend.get_range(A, 3, 500) == DATA[3:503]
    assert buffer == DATA[1:]


async def test_file_that_shrinks_while_read(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    await backend.put_if_absent(A, DATA)
    monkeypatch.setattr(os, "pread", lambda file, size, at: b"")
    monkeypatch.setattr(os, "preadv", lambda file, views, at: 0)
    for call in (backend.get(A), backend.get_range(A, 0, 3), backend.get_range_into(A, 0, memoryview(bytearray(3)))):
        with pytest.raises(Truncated, match="truncated"):
            await call


async def test_cancelled_call_ends_after_its_thread(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    await backend.put_if_absent(A, DATA)
    reading, go_on, original = threading.Event(), threading.Event(), os.preadv

    def slow(file: int, views: list[memoryview], at: int) -> int:
        reading.set()
        assert go_on.wait(30)
        return original(file, views, at)

    monkeypatch.setattr(os, "preadv", slow)
    buffer = bytearray(len(DATA))
    task = asyncio.create_task(backend.get_range_into(A, 0, memoryview(buffer)))
    await asyncio.to_thread(reading.wait, 30)
    for _ in range(3):  # insisting does not help
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert buffer == DATA

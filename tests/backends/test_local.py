"""The local backend keeps the promise, leaves nothing behind, and follows no links."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import TYPE_CHECKING

import pytest

from backends import AlreadyExists, Backend, NotFound, ObjectKey, Permanent
from backends.local import LocalBackend
from backends.testing.conformance import DATA, BackendConformance, keys, stream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine
    from pathlib import Path

A = ObjectKey("folder/object")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "new" / "store"


@pytest.fixture
async def backend(root: Path) -> AsyncIterator[Backend]:
    async with LocalBackend(str(root)) as backend:
        yield backend


class TestLocal(BackendConformance):
    @pytest.fixture(autouse=True)
    def hurry(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        """Ten thousand objects need not be durable to be listed: a busy disk would take minutes."""
        if request.node.name == "test_list_of_many":
            monkeypatch.setattr(os, "fsync", lambda descriptor: None)

    @pytest.fixture
    async def backend(self, root: Path) -> AsyncIterator[Backend]:
        before = set(os.listdir("/proc/self/fd"))
        async with LocalBackend(str(root)) as backend:
            yield backend
        assert left_over(root) == []
        assert set(os.listdir("/proc/self/fd")) <= before

    @pytest.fixture
    async def reopen(self, root: Path) -> AsyncIterator[Callable[[], Backend]]:
        opened: list[Backend] = []

        def reopen() -> Backend:
            opened.append(LocalBackend(str(root)))
            return opened[-1]

        yield reopen
        for backend in opened:
            await backend.close()


def left_over(root: Path) -> list[str]:
    return [name for _, _, names in os.walk(root) for name in names if name.endswith(".tmp")]


# Footprint


async def test_opening_and_reading_create_nothing(tmp_path: Path, root: Path) -> None:
    async with LocalBackend(str(root)) as backend:
        for call in (backend.get(A), backend.stat(A), backend.delete(A)):
            with pytest.raises(NotFound):
                await call
        assert await keys(backend) == []
    assert os.listdir(tmp_path) == []


async def test_files_are_plain_and_where_the_key_says(backend: Backend, root: Path) -> None:
    await backend.put(A, stream(DATA))
    assert (root / "folder" / "object").read_bytes() == DATA
    assert (root / "folder" / "object").stat().st_nlink == 1


async def test_delete_removes_emptied_folders_but_not_the_root(backend: Backend, root: Path) -> None:
    await backend.put_if_absent(ObjectKey("a/b/c/x"), b"")
    await backend.put_if_absent(ObjectKey("a/y"), b"")
    await backend.delete(ObjectKey("a/b/c/x"))
    assert os.listdir(root / "a") == ["y"]
    await backend.delete(ObjectKey("a/y"))
    assert os.listdir(root) == []


async def test_foreign_files_are_not_listed(backend: Backend, root: Path) -> None:
    await backend.put_if_absent(A, b"")
    for name in (b"x.tmp", b"back\\slash", b"\xff", b"new\nline"):
        os.close(os.open(os.fsencode(root) + b"/" + name, os.O_CREAT))
        os.mkdir(os.fsencode(root) + b"/folder/" + name)
    os.mkfifo(root / "pipe")
    os.symlink("folder/object", root / "link")
    assert await keys(backend) == [A.path]


async def test_root_may_vanish_and_come_back(backend: Backend, root: Path) -> None:
    await backend.put_if_absent(A, b"1")
    os.rename(root, root.parent / "moved")
    assert await keys(backend) == []
    await backend.put_if_absent(A, b"2")
    assert (root / A.path).read_bytes() == b"2"


# Files in the way, links


async def test_file_where_a_folder_must_be(backend: Backend, root: Path) -> None:
    await backend.put_if_absent(ObjectKey("folder"), DATA)
    calls = (backend.put(A, stream(DATA)), backend.put_if_absent(A, DATA), backend.get(A), backend.stat(A))
    for call in calls:
        with pytest.raises(Permanent, match=r"folder/object.*ENOTDIR.*file lies where a folder must be"):
            await call
    assert await keys(backend) == ["folder"]


async def test_folder_where_an_object_must_be(backend: Backend) -> None:
    await backend.put_if_absent(A, DATA)
    for call in (backend.put_if_absent(ObjectKey("folder"), DATA), backend.put(ObjectKey("folder"), stream())):
        with pytest.raises(Permanent, match="EISDIR"):
            await call
    assert await keys(backend) == [A.path]


async def test_root_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    async with LocalBackend(str(tmp_path / "file")) as backend:
        for call in (backend.get(A), backend.put_if_absent(A, DATA), keys(backend), keys(backend, "folder")):
            with pytest.raises(Permanent, match="no folder"):
                await call


async def test_links_are_never_followed(backend: Backend, root: Path, tmp_path: Path) -> None:
    await backend.put_if_absent(ObjectKey("x"), b"")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "object").write_bytes(b"secret")
    (root / "folder").symlink_to(outside)
    (root / "object").symlink_to(outside / "object")
    new = ObjectKey("folder/new")
    calls: list[Coroutine[object, object, object]] = [
        backend.put(new, stream(DATA)),
        backend.put_if_absent(new, DATA),
        backend.delete(A),
        keys(backend, "folder"),
    ]
    for key in (A, ObjectKey("object")):
        calls += [backend.get(key), backend.get_range(key, 0, 1), backend.stat(key)]
        calls += [backend.get_range_into(key, 0, memoryview(bytearray(1)))]
    for call in calls:
        with pytest.raises(Permanent, match=r"ELOOP.*symbolic link"):
            await call
    with pytest.raises(Permanent):
        await backend.delete(ObjectKey("object"))
    with pytest.raises(AlreadyExists):
        await backend.put_if_absent(ObjectKey("object"), DATA)
    assert await keys(backend) == ["x"]
    assert os.listdir(outside) == ["object"]
    assert (outside / "object").read_bytes() == b"secret"


async def test_pipes_do_not_hang(backend: Backend, root: Path) -> None:
    await backend.put_if_absent(ObjectKey("x"), b"")
    os.mkfifo(root / "pipe")
    with pytest.raises(Permanent, match="no object"):
        await backend.get(ObjectKey("pipe"))


async def test_calls_from_several_loops(backend: Backend) -> None:
    async def write(number: int) -> None:
        await backend.put(ObjectKey(f"{number}"), stream(DATA))

    await asyncio.gather(*(asyncio.to_thread(asyncio.run, write(number)) for number in range(8)))
    assert len(await keys(backend)) == 8


def test_sockets_are_no_objects(root: Path) -> None:
    root.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(root / "s"))
        with pytest.raises(Permanent):
            asyncio.run(LocalBackend(str(root)).get(ObjectKey("s")))

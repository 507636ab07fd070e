"""What the local backend does in which order, and what is left when it is killed or runs out of space."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from backends import AlreadyExists, Backend, NoSpace, ObjectKey, Permanent
from backends.local import LocalBackend
from backends.testing.conformance import DATA, keys, stream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

A = ObjectKey("folder/object")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "new" / "store"


@pytest.fixture
async def backend(root: Path) -> AsyncIterator[Backend]:
    async with LocalBackend(str(root)) as backend:
        yield backend


# Durable order


class Recorder:
    """Wraps the os functions that matter, and writes down what they did in terms of paths."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, top: Path) -> None:
        self.steps: list[tuple[str, str]] = []
        self.top = str(top)
        for name in ("mkdir", "fsync", "link", "unlink", "rmdir"):
            monkeypatch.setattr(os, name, self.wrapped(name, getattr(os, name)))

    def wrapped(self, name: str, original: Callable[..., None]) -> Callable[..., None]:
        def call(*args: object, **kwargs: object) -> None:
            step = (name, self.what(name, args, kwargs))
            original(*args, **kwargs)
            self.steps.append(step)

        return call

    def what(self, name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> str:
        if name == "fsync":
            path = os.readlink(f"/proc/self/fd/{args[0]}")
            return self.short(path) + (f" {os.fstat(int(str(args[0]))).st_size}" if os.path.isfile(path) else "")
        folder = kwargs.get("dir_fd", kwargs.get("dst_dir_fd"))
        above = "" if folder is None else os.readlink(f"/proc/self/fd/{folder}") + "/"
        return self.short(f"{above}{args[1] if name == 'link' else args[0]}")

    def short(self, path: str) -> str:
        path = path.removeprefix(self.top)
        return f"{path.rsplit('.', 2)[0]}.TMP" if path.endswith(".tmp") else path


async def test_order_of_a_write(backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch, tmp_path)
    size = await backend.put(A, stream(bytes(1 << 20), DATA))
    top, store, folder = "/new", "/new/store", "/new/store/folder"
    publishing = [("unlink", f"{folder}/object.TMP"), ("fsync", folder)]
    assert recorder.steps == [
        *(("mkdir", top), ("fsync", "")),
        *(("mkdir", store), ("fsync", top)),
        *(("mkdir", folder), ("fsync", store)),
        ("fsync", f"{folder}/object.TMP {size}"),
        ("link", f"{folder}/object"),
        *publishing,
    ]
    recorder.steps.clear()
    await backend.put_if_absent(ObjectKey("folder/small"), DATA)
    assert recorder.steps == [
        ("fsync", f"{folder}/small.TMP {len(DATA)}"),
        ("link", f"{folder}/small"),
        ("unlink", f"{folder}/small.TMP"),
        ("fsync", folder),
    ]


async def test_folders_made_by_others_are_synced_too(
    backend: Backend, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "folder").mkdir(parents=True)
    recorder = Recorder(monkeypatch, tmp_path)
    await backend.put_if_absent(A, DATA)
    assert recorder.steps[0] == ("fsync", "/new/store")


async def test_folders_that_went_and_came_back_are_synced_again(
    backend: Backend, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await backend.put_if_absent(A, DATA)
    await backend.delete(A)
    (root / "folder").mkdir()
    recorder = Recorder(monkeypatch, tmp_path)
    await backend.put_if_absent(A, DATA)
    assert recorder.steps[0] == ("fsync", "/new/store")


async def test_order_of_a_delete(backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await backend.put_if_absent(A, DATA)
    recorder = Recorder(monkeypatch, tmp_path)
    await backend.delete(A)
    folder = "/new/store/folder"
    assert recorder.steps == [("unlink", f"{folder}/object"), ("fsync", folder), ("rmdir", folder)]


async def test_whoever_loses_may_rely_on_the_winner(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await backend.put_if_absent(A, DATA)
    recorder = Recorder(monkeypatch, tmp_path)
    with pytest.raises(AlreadyExists):
        await backend.put_if_absent(A, DATA)
    assert recorder.steps == [("fsync", "/new/store/folder")]


# Crashes

WRITER = """
import asyncio, sys
from backends import ObjectKey, open_backend

async def parts():
    yield bytes(1 << 20)
    print("writing", flush=True)
    await asyncio.Event().wait()
    yield b""

asyncio.run(open_backend(sys.argv[1]).put(ObjectKey("folder/object"), parts()))
"""


async def test_killed_in_the_middle_of_a_put(backend: Backend, root: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(root)]
    writer = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert writer.stdout is not None and await writer.stdout.readline() == b"writing\n"
    writer.kill()
    assert await writer.wait() == -signal.SIGKILL
    (name,) = os.listdir(root / "folder")
    stem, unique, end = name.rsplit(".", 2)
    assert (stem, len(unique), end) == ("object", 8, "tmp")
    assert (root / "folder" / name).stat().st_size == 1 << 20
    assert await keys(backend) == []
    await backend.put_if_absent(A, DATA)
    assert await keys(backend) == [A.path]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("only root, allowed to mount, can make a disk that is full")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


async def test_full_disk(small_disk: Path) -> None:
    async with LocalBackend(str(small_disk / "store")) as backend:
        with pytest.raises(NoSpace, match=r"folder/object.*ENOSPC.*free space") as caught:
            await backend.put(A, stream(*[bytes(400_000)] * 3))
        assert caught.value.full
        assert isinstance(caught.value.__cause__, OSError)
        with pytest.raises(NoSpace):
            await backend.put_if_absent(A, bytes(2 << 20))
        assert await keys(backend) == []
        assert os.listdir(small_disk / "store") == []
        await backend.put(A, stream(bytes(400_000)))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
async def test_forbidden_folder(backend: Backend, root: Path) -> None:
    os.makedirs(root)
    os.chmod(root, 0o500)
    with pytest.raises(Permanent, match=r"EACCES.*allow"):
        await backend.put_if_absent(A, DATA)

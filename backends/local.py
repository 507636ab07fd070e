"""Objects as files below one folder: a local disk, or NFS and other shared file systems."""

from __future__ import annotations

import asyncio
import errno
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import aiofiles

from .base import WHOLE_LIMIT, Backend, Capabilities, ObjectInfo, check_range, flat
from .errors import BackendError, NoSpace, NotFound, Permanent, Transient, Truncated
from .key import InvalidKey, ObjectKey
from .posix import Staged, Tree

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator

    from aiofiles.threadpool.binary import AsyncFileIO
    from typing_extensions import Buffer

P = ParamSpec("P")
T = TypeVar("T")

Entry = tuple[tuple[str, ...], ObjectInfo | None]  # path from the root; None for a folder

THREADS = 8  #: file system calls in flight at most
GATHER = 256 << 10  #: bytes of small parts that are copied together before they are written

_REMEDIES = {
    errno.EACCES: "allow this user to use it, or choose another place",
    errno.EPERM: "allow this user to use it, or choose another place",
    errno.EROFS: "mount the file system writable, or choose another place",
    errno.ENOTDIR: "a file lies where a folder must be: move it away",
    errno.EISDIR: "a folder has the object's name: move it away",
    errno.ELOOP: "symbolic links below the root are not followed: put the real folder there, or mount it",
}
_PASSING = (
    errno.EIO,  # a write is tried again from the start, in a new file, so a failed fsync does no harm
    errno.EAGAIN,
    errno.EBUSY,
    errno.EINTR,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
)


class LocalBackend(Backend):
    """Files below `root`, which the first write creates. Writes are durable (fsync) when they return."""

    capabilities = Capabilities(conditional_put=True, durability="fsync")

    def __init__(self, root: str) -> None:
        self.root = os.path.realpath(root)
        self._tree = Tree(self.root)
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="backends.local")

    async def get(self, key: ObjectKey, *, limit: int = WHOLE_LIMIT) -> bytes:
        return await self._call(key, self._read_whole, key, limit)

    async def get_range(self, key: ObjectKey, start: int, length: int) -> bytes:
        check_range(start, length)
        return await self._call(key, self._read_range, key, start, length)

    async def get_range_into(self, key: ObjectKey, start: int, buffer: memoryview) -> None:
        check_range(start, 0)
        await self._call(key, self._read_into, key, start, flat(buffer))

    async def put(self, key: ObjectKey, parts: AsyncIterable[Buffer]) -> int:
        staged = Staged(self._tree, key)
        try:
            await self._call(key, staged.open)
            size = await self._write(staged, parts)
            await self._call(key, staged.publish)
        finally:
            await self._call(key, staged.close)
        return size

    async def put_if_absent(self, key: ObjectKey, data: bytes) -> None:
        await self._call(key, self._write_whole, key, data)

    async def list(self, prefix: ObjectKey | None = None) -> AsyncIterator[ObjectInfo]:
        waiting: list[Entry] = [(() if prefix is None else prefix.segments, None)]
        while waiting:
            segments, info = waiting.pop()
            if info is None:
                waiting += reversed(await self._call(prefix, _entries, self._tree, segments))
            else:
                yield info

    async def stat(self, key: ObjectKey) -> ObjectInfo:
        return _info(key, await self._call(key, self._tree.stat, key))

    async def delete(self, key: ObjectKey) -> None:
        await self._call(key, self._tree.delete, key)

    async def close(self) -> None:
        await asyncio.to_thread(self._pool.shutdown)

    async def _call(self, key: ObjectKey | None, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a blocking function in a thread, its OSErrors translated."""
        with _translated(key, self.root):
            work = partial(function, *args, **kwargs)
            return await _settled(asyncio.get_running_loop().run_in_executor(self._pool, work))

    async def _write(self, staged: Staged, parts: AsyncIterable[Buffer]) -> int:
        """Write the stream to the temporary file; large parts straight from where they are."""
        file = await aiofiles.open(staged.file, "wb", buffering=0, closefd=False, executor=self._pool)
        size = 0
        gathered = bytearray()
        async for part in parts:
            view = flat(part)
            size += len(view)
            if len(gathered) + len(view) > GATHER:
                await self._write_all(staged.key, file, memoryview(gathered))
                gathered = bytearray()
            if len(view) > GATHER:
                await self._write_all(staged.key, file, view)
            else:
                gathered += view
        await self._write_all(staged.key, file, memoryview(gathered))
        return size

    async def _write_all(self, key: ObjectKey, file: AsyncFileIO, view: memoryview) -> None:
        while view:
            with _translated(key, self.root):
                view = view[await _settled(file.write(view)) :]

    def _write_whole(self, key: ObjectKey, data: bytes) -> None:
        staged = Staged(self._tree, key)
        try:
            staged.open()
            view = flat(data)
            while view:
                view = view[os.write(staged.file, view) :]
            staged.publish()
        finally:
            staged.close()

    def _read_whole(self, key: ObjectKey, limit: int) -> bytes:
        with self._tree.reading(key) as (file, size):
            if size > limit:
                raise Permanent(key, f"has {size} bytes, more than the {limit} that the reader accepts")
            return _pread(key, file, 0, size)

    def _read_range(self, key: ObjectKey, start: int, length: int) -> bytes:
        with self._tree.reading(key) as (file, size):
            if start + length > size:
                raise _truncated(key, start + length, size)
            return _pread(key, file, start, length)

    def _read_into(self, key: ObjectKey, start: int, view: memoryview) -> None:
        with self._tree.reading(key) as (file, size):
            end = start + len(view)
            if end > size:
                raise _truncated(key, end, size)
            while view:
                count = os.preadv(file, [view], end - len(view))
                if not count:
                    raise _truncated(key, end, end - len(view))
                view = view[count:]


def _entries(tree: Tree, segments: tuple[str, ...]) -> list[Entry]:
    """Folders and objects of a folder, a folder sorted by its name with the slash: depth first, that is key order."""
    try:
        folders, files = tree.scan(segments)
    except (FileNotFoundError, NotADirectoryError):
        return []  # no such folder, or an object where one is asked for
    found: list[tuple[str, Entry]] = []
    for name, status in (*((name, None) for name in folders), *files):
        below = (*segments, name)
        with suppress(InvalidKey):  # not ours: no object can have such a name
            key = ObjectKey("/".join(below))
            found.append((f"{name}/", (below, None)) if status is None else (name, (below, _info(key, status))))
    return [entry for _, entry in sorted(found, key=itemgetter(0))]


async def _settled(work: Awaitable[T]) -> T:
    """The result of work in a thread. A cancellation comes through only when the thread is done, so that nobody closes
    a file or reuses a buffer under its hands."""
    future = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait((future,))
        if not future.cancelled():
            future.exception()  # seen: the cancellation is what counts
        raise


@contextmanager
def _translated(key: ObjectKey | None, root: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _translate(error, key, root) from error


def _translate(error: OSError, key: ObjectKey | None, root: str) -> BackendError:
    reason = f"{error.strerror} ({errno.errorcode.get(error.errno or 0, error.errno)}) below {root}"
    if error.errno == errno.ENOENT:
        return NotFound(key, f"there is no such object below {root}")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpace(key, f"{reason}; free space or raise the quota there, or choose another place")
    if error.errno in _PASSING:
        return Transient(key, f"{reason}; try again, and look at the system log if it stays")
    return Permanent(key, f"{reason}; {_REMEDIES.get(error.errno or 0, 'look at the system log')}")


def _truncated(key: ObjectKey, expected: int, actual: int) -> Truncated:
    return Truncated(key, f"truncated: expected at least {expected} bytes, it has {actual}")


def _pread(key: ObjectKey, file: int, start: int, length: int) -> bytes:
    pieces = []
    at, end = start, start + length
    while at < end:
        piece = os.pread(file, min(end - at, 1 << 30), at)  # the kernel reads no more than 2 GiB at once
        if not piece:
            raise _truncated(key, end, at)
        pieces.append(piece)
        at += len(piece)
    return b"".join(pieces)  # a single piece is not copied


def _info(key: ObjectKey, status: os.stat_result) -> ObjectInfo:
    return ObjectInfo(key, status.st_size, status.st_mtime)

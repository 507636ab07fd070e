"""Memory shared between processes: sealed memfd segments, and framed messages that carry them over a Unix socket.

A segment has no name that could outlive its users: the kernel frees it with the last descriptor and mapping.
"""

from __future__ import annotations

import array
import asyncio
import ctypes
import errno
import fcntl
import mmap
import os
import socket
import struct
from contextlib import closing, suppress
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Sequence

T = TypeVar("T")

MAX_DESCRIPTORS = 8  #: that one message can carry
MESSAGE_LIMIT = 1 << 20  #: bytes of a message that a receiver accepts unless told otherwise

_HEADER = struct.Struct("!I")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL  # a shorter file would kill whoever maps it
_MADV_POPULATE_WRITE = 23  # from Linux 5.14 on
_STRIDE = 256 << 20  # bytes populated per call, so that others get at the address space in between


class Segment:
    """Memory that every process with the descriptor can map; it can never shrink below a mapping.

    `buffer` is all of it, as bytes. `fd` and `buffer` are the segment's own: they end with `close`.
    """

    def __init__(self, fd: int, size: int, *, writable: bool) -> None:
        """Map a sealed memfd. Use `create` or `adopt`."""
        self.fd, self.size = fd, size
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._map: mmap.mmap | None = mmap.mmap(fd, size, mmap.MAP_SHARED, protection)
        self.buffer = memoryview(self._map)

    @classmethod
    def create(cls, size: int, name: str) -> Segment:
        """A new segment of `size` zero bytes, writable; `name` is seen in /proc only.

        :raises ValueError: size is not positive.
        :raises OSError: the system allows no such segment.
        """
        if size <= 0:
            raise ValueError(f"segment {name} cannot have {size} bytes")
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(fd, size, writable=True)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def adopt(cls, fd: int, *, writable: bool = True, size: int | None = None) -> Segment:
        """The segment behind a descriptor from another process, taken over unless this raises.

        :raises ValueError: it is no memfd sealed against shrinking, is empty, or has not the `size` given.
        """
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError as error:
            raise ValueError(f"descriptor {fd} is no shared memory segment ({error.strerror})") from error
        if not seals & fcntl.F_SEAL_SHRINK:  # only a memfd can have it
            raise ValueError(f"descriptor {fd} is not sealed against shrinking: its owner could kill its readers")
        actual = os.fstat(fd).st_size
        if actual <= 0 or size not in (None, actual):
            raise ValueError(f"segment behind descriptor {fd} has {actual} bytes, expected {size or 'some'}")
        return cls(fd, actual, writable=writable)

    def prefault(self) -> None:
        """Allocate and map all pages of a writable segment now, so that no later access has to. Other threads run on.

        :raises MemoryError: there is not that much memory.
        :raises ValueError: the segment is closed.
        :raises TypeError: the segment is read-only.
        """
        for start in range(0, self.size, _STRIDE):
            number = _populate(self.buffer[start : start + _STRIDE])
            if number == errno.EINVAL:  # Linux before 5.14: allocate, without mapping
                return self._allocate()
            if number:
                raise MemoryError(f"no memory for a segment of {self.size} bytes ({os.strerror(number)})")

    def close(self) -> None:
        """Let go of descriptor and memory. What others made from `buffer` stays valid, and keeps the memory, until it
        is gone. May be called twice."""
        if self._map is None:
            return
        mapped, self._map = self._map, None
        with suppress(BufferError):  # still in use: unmapped with its last user
            self.buffer.release()
            mapped.close()
        os.close(self.fd)

    def _allocate(self) -> None:
        try:
            os.posix_fallocate(self.fd, 0, self.size)
        except OSError as error:
            raise MemoryError(f"no memory for a segment of {self.size} bytes ({error.strerror})") from error

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Peer(NamedTuple):
    """Who is at the other end of a Unix socket, as the kernel saw it connect."""

    pid: int
    uid: int
    gid: int


def peer(sock: socket.socket) -> Peer:
    """The process at the other end of a connected Unix socket."""
    size = struct.calcsize("3i")
    return Peer(*struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)))


def check_peer(sock: socket.socket) -> Peer:
    """The peer, if it is of the same user.

    :raises PermissionError: it is another user's.
    """
    other = peer(sock)
    if other.uid != os.geteuid():
        raise PermissionError(f"process {other.pid} of user {other.uid} may not talk to user {os.geteuid()}")
    return other


class BadMessage(ConnectionError):
    """What came is no acceptable message; the connection cannot be used any further."""


def send(sock: socket.socket, data: bytes, fds: Sequence[int] = ()) -> None:
    """Send one message over a blocking SOCK_STREAM Unix socket. The descriptors stay the caller's.

    :raises ValueError: more than MAX_DESCRIPTORS descriptors, or 4 GiB of data and more.
    :raises ConnectionError: the other end is gone.
    :raises TimeoutError: it took nothing for as long as the socket allows; the connection can only be closed.
    """
    _run(_sending(sock, data, fds))


def recv(sock: socket.socket, *, limit: int = MESSAGE_LIMIT) -> tuple[bytes, list[int]]:
    """Receive one message from a blocking SOCK_STREAM Unix socket: its data, and descriptors that the caller owns.

    :raises EOFError: the other end closed after its last message.
    :raises BadMessage: more than `limit` bytes or MAX_DESCRIPTORS descriptors; all that came are closed.
    :raises ConnectionError: the connection broke within the message.
    """
    return _run(_receiving(sock, limit))


async def asend(sock: socket.socket, data: bytes, fds: Sequence[int] = ()) -> None:
    """As `send`, over a non-blocking socket, one call at a time. After a cancellation the socket can only be closed."""
    await _run_async(_sending(sock, data, fds), lambda: _ready(sock, "writer"))


async def arecv(sock: socket.socket, *, limit: int = MESSAGE_LIMIT) -> tuple[bytes, list[int]]:
    """As `recv`, over a non-blocking socket, one call at a time. After a cancellation the socket can only be closed."""
    return await _run_async(_receiving(sock, limit), lambda: _ready(sock, "reader"))


# The two below do what the socket allows now, and yield where it would block.


def _sending(sock: socket.socket, data: bytes, fds: Sequence[int]) -> Generator[None, None, None]:
    if len(fds) > MAX_DESCRIPTORS:
        raise ValueError(f"a message cannot carry {len(fds)} descriptors, only {MAX_DESCRIPTORS}")
    if len(data) >= 1 << 32:
        raise ValueError(f"a message cannot have {len(data)} bytes")
    control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    unsent = memoryview(_HEADER.pack(len(data)) + data)
    while unsent:
        try:
            count = sock.sendmsg([unsent], control, socket.MSG_NOSIGNAL)
        except BlockingIOError as error:
            if sock.getblocking():  # SO_SNDTIMEO
                raise TimeoutError("the other end takes nothing") from error
            yield
            continue
        unsent, control = unsent[count:], []  # the descriptors go with the first bytes


def _receiving(sock: socket.socket, limit: int) -> Generator[None, None, tuple[bytes, list[int]]]:
    fds: list[int] = []
    try:
        header = yield from _receive(sock, _HEADER.size, fds)
        (size,) = _HEADER.unpack(header)
        if size > limit:
            raise BadMessage(f"a message of {size} bytes came, more than {limit}")
        try:
            data = yield from _receive(sock, size, fds)
        except EOFError as error:
            raise ConnectionResetError("the connection ended within a message") from error
        return data, fds
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise


def _receive(sock: socket.socket, size: int, fds: list[int]) -> Generator[None, None, bytes]:
    """Exactly `size` bytes; the descriptors that come with them are added to `fds`."""
    data = bytearray(size)
    missing = memoryview(data)
    while missing:
        try:
            count, control, flags, _ = sock.recvmsg_into(
                [missing], socket.CMSG_SPACE(MAX_DESCRIPTORS * 4), socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            yield
            continue
        for level, kind, content in control:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds += array.array("i", content[: len(content) // 4 * 4])
        if flags & socket.MSG_CTRUNC or len(fds) > MAX_DESCRIPTORS:
            raise BadMessage("more descriptors came than a message can carry, or than this process can open")
        if not count and missing.nbytes == size:
            raise EOFError("the other end closed the connection")
        if not count:
            raise ConnectionResetError("the connection ended within a message")
        missing = missing[count:]
    return bytes(data)


def _run(steps: Generator[None, None, T]) -> T:
    with closing(steps):
        try:
            next(steps)
        except StopIteration as done:
            result: T = done.value
            return result
        raise ValueError("the socket is non-blocking: use asend and arecv")


async def _run_async(steps: Generator[None, None, T], ready: Callable[[], Awaitable[None]]) -> T:
    with closing(steps):
        while True:
            try:
                next(steps)
            except StopIteration as done:
                result: T = done.value
                return result
            await ready()


async def _ready(sock: socket.socket, role: str) -> None:
    """Wait until the loop sees the socket ready; `role` is reader or writer."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    add, remove = (loop.add_reader, loop.remove_reader) if role == "reader" else (loop.add_writer, loop.remove_writer)
    add(sock, ready.set)
    try:
        await ready.wait()
    finally:
        remove(sock)


def _populate(buffer: memoryview) -> int:
    """Allocate and map the pages of a writable buffer; the error number, 0 for success. Runs without the GIL."""
    libc = ctypes.CDLL(None, use_errno=True)
    start = ctypes.c_char.from_buffer(buffer)
    failed = libc.madvise(ctypes.byref(start), ctypes.c_size_t(len(buffer)), _MADV_POPULATE_WRITE)
    return ctypes.get_errno() if failed else 0

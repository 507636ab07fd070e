"""Segments, the other end of a socket, and two real processes that share memory."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING

import numpy as np
import pytest

from backends import sharedmem
from backends.sharedmem import (
    Segment,
    check_peer,
    peer,
    recv,
    send,
)

if TYPE_CHECKING:
    from .conftest import Pair

SIZE = 3 * mmap.PAGESIZE + 100
pytestmark = pytest.mark.usefixtures("no_leaks")


# Segments


def test_segment_is_zeroed_writable_and_of_its_size() -> None:
    with Segment.create(SIZE, "test") as segment:
        assert segment.size == len(segment.buffer) == os.fstat(segment.fd).st_size == SIZE
        assert bytes(segment.buffer) == bytes(SIZE)
        segment.buffer[-1] = 7
        assert os.readlink(f"/proc/self/fd/{segment.fd}").startswith("/memfd:test")
        assert not os.get_inheritable(segment.fd)


def test_segment_cannot_shrink_nor_be_sealed_any_further() -> None:
    with Segment.create(SIZE, "test") as segment:
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fd, 10)
        with pytest.raises(PermissionError):
            fcntl.fcntl(segment.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


@pytest.mark.parametrize("size", [0, -1])
def test_segment_needs_a_size(size: int) -> None:
    with pytest.raises(ValueError, match="bytes"):
        Segment.create(size, "test")


def test_adopted_segment_shares_memory() -> None:
    with Segment.create(SIZE, "test") as one, Segment.adopt(os.dup(one.fd), size=SIZE) as other:
        one.buffer[:3] = b"abc"
        other.buffer[3:6] = b"def"
        assert bytes(one.buffer[:6]) == bytes(other.buffer[:6]) == b"abcdef"


def test_adopted_read_only() -> None:
    with Segment.create(SIZE, "test") as one, Segment.adopt(os.dup(one.fd), writable=False) as other:
        assert other.buffer.readonly
        one.buffer[0] = 9
        assert other.buffer[0] == 9
        with pytest.raises(TypeError):
            other.buffer[0] = 1
        with pytest.raises(TypeError):
            other.prefault()


def test_adopt_refuses_what_could_shrink_or_surprise() -> None:
    unsealed = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, SIZE)
    empty = os.memfd_create("empty", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fcntl.fcntl(empty, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    reader, writer = os.pipe()
    try:
        with Segment.create(SIZE, "test") as segment, tempfile.TemporaryFile() as file:
            file.truncate(SIZE)
            for fd in (unsealed, empty, reader, file.fileno()):
                with pytest.raises(ValueError, match=f"descriptor {fd}"):
                    Segment.adopt(fd)
                os.fstat(fd)  # still the caller's
            with pytest.raises(ValueError, match=f"{SIZE} bytes, expected {SIZE + 1}"):
                Segment.adopt(segment.fd, size=SIZE + 1)
    finally:
        for fd in (unsealed, empty, reader, writer):
            os.close(fd)


def test_prefault_allocates_everything() -> None:
    with Segment.create(64 << 20, "test") as segment:
        assert os.fstat(segment.fd).st_blocks == 0
        segment.buffer[5] = 5
        segment.prefault()
        assert os.fstat(segment.fd).st_blocks * 512 == 64 << 20
        assert bytes(segment.buffer[:10]) == b"\0\0\0\0\0\5\0\0\0\0"


def test_prefault_on_old_kernels_and_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with Segment.create(1 << 20, "test") as segment:
        monkeypatch.setattr(sharedmem, "_populate", lambda _: errno.EINVAL)
        segment.prefault()
        assert os.fstat(segment.fd).st_blocks * 512 == 1 << 20
        for number in (errno.ENOMEM, errno.EFAULT):
            monkeypatch.setattr(sharedmem, "_populate", lambda _, number=number: number)
            with pytest.raises(MemoryError, match=f"{1 << 20} bytes"):
                segment.prefault()


def test_close_twice_and_with_views_left() -> None:
    segment = Segment.create(SIZE, "test")
    array_over_it, view = np.frombuffer(segment.buffer, np.uint8), segment.buffer[10:20]
    segment.close()
    segment.close()
    array_over_it[10] = 42
    assert view[0] == 42
    del array_over_it, view
    closed = Segment.create(SIZE, "test")
    closed.close()
    with pytest.raises(ValueError):
        _ = closed.buffer[0]
    with pytest.raises(ValueError):
        closed.prefault()


# Peers


def test_peer_is_who_connected(pair: Pair) -> None:
    assert peer(pair[0]) == (os.getpid(), os.geteuid(), os.getegid()) == check_peer(pair[0])


def test_other_users_are_refused(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    with pytest.raises(PermissionError, match="54321"):
        check_peer(pair[0])


# Two processes

OTHER = """
import os, socket, sys
from backends.sharedmem import Segment, check_peer, recv, send

sock = socket.socket(fileno=int(sys.argv[1]))
assert check_peer(sock).pid == os.getppid()
data, (fd,) = recv(sock)
with Segment.adopt(fd, size=int(data)) as segment:
    assert bytes(segment.buffer[:5]) == b"hello"
    segment.buffer[:5] = b"world"
with Segment.create(4096, "answer") as answer:
    answer.buffer[:6] = b"answer"
    send(sock, b"done", [answer.fd])
"""


def test_between_two_processes(pair: Pair) -> None:
    command = [sys.executable, "-c", OTHER, str(pair[1].fileno())]
    with (
        Segment.create(SIZE, "test") as segment,
        subprocess.Popen(command, pass_fds=[pair[1].fileno()]) as other,
    ):
        pair[1].close()
        segment.buffer[:5] = b"hello"
        send(pair[0], str(SIZE).encode(), [segment.fd])
        data, (fd,) = recv(pair[0])
        assert other.wait(30) == 0
        assert data == b"done"
        assert bytes(segment.buffer[:5]) == b"world"
        with Segment.adopt(fd, writable=False) as answer:  # outlives its maker
            assert bytes(answer.buffer[:6]) == b"answer"
        with pytest.raises(EOFError):
            recv(pair[0])

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

pytest.register_assert_rewrite("backends.testing")

Pair = tuple[socket.socket, socket.socket]


def descriptors() -> dict[str, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[name] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the one that listed the folder
            continue
    return found


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """The test leaves no descriptor open."""
    before = descriptors()
    yield
    assert {fd: what for fd, what in descriptors().items() if before.get(fd) != what} == {}


@pytest.fixture
def pair() -> Iterator[Pair]:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with one, other:
        yield one, other

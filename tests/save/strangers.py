"""Trainers, and others, at an agent's door."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from backends import canonical_url, sharedmem
from ckptstore.agent import wire
from ckptstore.config import settings
from ckptstore.saving.client import AgentClient


def new_client(store: Path, runtime: Path) -> AgentClient:
    given = settings(url=str(store), runtime_dir=runtime, agent_linger="1s")
    return AgentClient(canonical_url(str(store)), given, lambda _: None, lambda _, error: error)


@contextmanager
def agent_of(store: Path, runtime: Path) -> Iterator[tuple[int, wire.Meeting]]:
    """An agent with one well-behaved trainer, this process; its process id and meeting place."""
    client = new_client(store, runtime)
    client.ensure()
    try:
        assert client.agent_pid is not None
        yield client.agent_pid, wire.meeting(runtime, client.url)
    finally:
        client.close()


class Stranger:
    """A connection that says what it likes."""

    def __init__(self, place: wire.Meeting) -> None:
        self.place = place
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(30)
        self.socket.connect(os.fspath(place.socket))

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def greet(self, store: Path, **changed: object) -> None:
        known = {"timeout": 600, "dedup_max_age": 3600, "agent_linger": 1}
        hello = {"type": "hello", "version": wire.VERSION, "secret": wire.secret(self.place), "settings": known}
        self.say({**hello, "url": canonical_url(str(store)), "environment": {}, **changed})

    def hello(self, store: Path, **changed: object) -> wire.Message:
        self.greet(store, **changed)
        return self.hear()

    def say(self, message: object, *fds: int) -> None:
        sharedmem.send(self.socket, wire.pack(message), fds)  # type: ignore[arg-type]

    def hear(self) -> wire.Message:
        return wire.unpack(sharedmem.recv(self.socket)[0])

    def is_shown_out(self) -> bool:
        """Whether the agent ends the connection without another word."""
        try:
            self.hear()
        except (EOFError, ConnectionError):
            return True
        return False

"""The agent as a thread of the trainer: for stores that live in the trainer's own memory."""

from __future__ import annotations

import asyncio
import socket
import threading

from .server import Server


def start(url: str, secret: str) -> tuple[socket.socket, threading.Thread]:
    """A connection to a new agent, and its thread, which ends once the connection is closed and all is stored."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)

    async def serve() -> None:
        server = Server(url, secret, linger=0)
        await server.attend(theirs)
        await server.finish()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="ckptstore-agent", daemon=True)
    thread.start()
    return ours, thread

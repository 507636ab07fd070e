"""The agent's front: accepts the ranks of its node, hears them, watches them, and ends when nobody needs it."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import select
import socket
from collections.abc import Callable

from backends import sharedmem
from backends.sharedmem import Segment

from ..errors import by_name
from ..format.keys import Attempt, Slot
from . import wire
from .gathering import Saves
from .line import Client
from .submission import RankPlan, Submission, SubmittedValue, key_from_json

log = logging.getLogger("ckptstore.agent")

_HELLO_SECONDS = 10
_START_SECONDS = 20  # an agent that nobody greets ends; a trainer that comes later starts another


class Server:
    """Serves one store to one node's ranks, from any number of runs."""

    def __init__(self, url: str, secret: str, linger: float | None) -> None:
        """:param linger: seconds to outlive trainers that died without close; None: serve until told to end."""
        self.url, self.secret, self.linger = url, secret, linger
        self.saves = Saves(url)
        self.clients: set[Client] = set()
        self.ended = asyncio.Event()
        self._connections: set[asyncio.Task[None]] = set()
        self._idle_until: float | None = None  #: with nobody connected, when to end

    async def serve(self, listener: socket.socket) -> None:
        """Accept ranks on `listener` until the last one has closed and every upload is done."""
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        self._end_in(_START_SECONDS)
        accepting = asyncio.ensure_future(self._accept(loop, listener))
        try:
            await self.ended.wait()
        finally:
            accepting.cancel()
            await self.close()

    def terminate(self) -> None:
        """End once the uploads under way are done, whoever is connected."""
        self.linger = 0
        self.clients.clear()
        self._end_in(0)

    async def finish(self) -> None:
        """Let the uploads end, then close."""
        while self.saves.running:
            await asyncio.wait(self.saves.running)
        await self.close()

    async def close(self) -> None:
        for connection in self._connections:
            connection.cancel()
        await self.saves.close()

    async def _accept(self, loop: asyncio.AbstractEventLoop, listener: socket.socket) -> None:
        while True:
            connection, _ = await loop.sock_accept(listener)
            task = asyncio.create_task(self.attend(connection))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def attend(self, connection: socket.socket) -> None:
        """Serve one rank until it closes or dies."""
        connection.setblocking(False)
        with connection, contextlib.ExitStack() as stack:
            try:
                sharedmem.check_peer(connection)
                pid = sharedmem.peer(connection)[0]
                client = await asyncio.wait_for(self._greet(connection, pid), _HELLO_SECONDS)
            except Exception as error:  # whoever it was, others go on being served
                log.warning("a connection was refused: %s: %s", type(error).__name__, error)
                return
            self.clients.add(client)
            self._idle_until = None
            reading = asyncio.ensure_future(self._listen(client))
            stack.callback(self._watch(client, reading))
            try:
                await reading
            except asyncio.CancelledError:
                log.info("trainer %d died", pid)
            except EOFError:
                log.info("trainer %d closed its line", pid)
            except Exception as error:  # it sent something wrong; others go on being served
                log.warning("trainer %d: %s: %s", pid, type(error).__name__, error)
            finally:
                self._leave(client)

    async def _greet(self, connection: socket.socket, pid: int) -> Client:
        data, fds = await sharedmem.arecv(connection, limit=wire.HELLO_LIMIT)
        _close_all(fds)
        hello = wire.unpack(data)
        refusal = None
        if hello["type"] != "hello" or hello["version"] != wire.VERSION:
            refusal = f"wire version {hello.get('version')!r}; this agent speaks {wire.VERSION}"
        elif not hmac.compare_digest(str(hello["secret"]).encode(), self.secret.encode()):
            refusal = "wrong secret"
        elif hello["url"] != self.url:
            refusal = f"this agent serves {self.url}, not {hello['url']}"
        if refusal:
            await sharedmem.asend(connection, wire.pack({"type": "refused", "message": refusal}))
            raise ValueError(refusal)
        settings = {name: float(hello["settings"][name]) for name in wire.SETTINGS}
        client = Client(connection, pid, settings, {str(k): str(v) for k, v in hello["environment"].items()})
        if self.linger is not None:
            self.linger = settings["agent_linger"]
        await sharedmem.asend(connection, wire.pack({"type": "welcome", "pid": os.getpid()}))
        return client

    async def _listen(self, client: Client) -> None:
        while True:
            data, fds = await sharedmem.arecv(client.socket, limit=wire.LIMIT)
            try:
                message = wire.unpack(data)
                if message["type"] == "plan":
                    self._learn(client, message)
                elif message["type"] == "submit":
                    await self.saves.take(_submission(client, message, fds), client)
                elif message["type"] == "refuse":
                    error = by_name(message["error"], message["reason"])
                    self.saves.refuse(Attempt(*message["attempt"]), error, client)
                elif message["type"] == "close":
                    client.closed = True  # it may stay to hear how its saves end
                    await client.tell({"type": "closed"})
                else:
                    raise ValueError(f"unknown message {message['type']!r}")
            finally:
                _close_all(fds)

    def _learn(self, client: Client, message: wire.Message) -> None:
        plan, run = RankPlan.from_json(message["plan"]), int(message["run"])
        if message["base"]:
            self.saves.bases[run] = Slot(*message["base"])
        client.plans = {(run, plan.fingerprint): plan}  # a rank has one structure at a time
        client.ranks.add((run, plan.rank))
        self.saves.gone.discard((run, plan.rank))

    def _watch(self, client: Client, reading: asyncio.Future[None]) -> Callable[[], None]:
        """End the reading when the trainer dies; end-of-file may never come, since its children hold the socket too."""
        try:
            fd = os.pidfd_open(client.pid)
        except OSError as error:
            log.warning("trainer %d cannot be watched (%s); its end-of-file will have to do", client.pid, error)
            return lambda: None
        loop = asyncio.get_running_loop()

        def died() -> None:  # what it sent before is still read
            loop.remove_reader(fd)
            if reading.done() or not select.select([client.socket], [], [], 0)[0]:
                reading.cancel()
            else:
                loop.call_later(0.01, died)

        def stop() -> None:
            loop.remove_reader(fd)
            os.close(fd)

        loop.add_reader(fd, died)
        return stop

    def _leave(self, client: Client) -> None:
        self.clients.discard(client)
        self.saves.gone |= client.ranks - {key for other in self.clients for key in other.ranks}
        self.saves.give_up_on_the_gone(nobody_left=not self.clients)
        if not self.clients and self.linger is not None:
            self._end_in(0 if client.closed else self.linger)

    def _end_in(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self._idle_until = loop.time() + seconds
        loop.call_later(seconds, self._end_if_idle)

    def _end_if_idle(self) -> None:
        """End when nobody is connected, the time for somebody to come is over, and every upload is done."""
        if self.clients or self._idle_until is None or asyncio.get_running_loop().time() < self._idle_until:
            return
        if self.saves.busy:
            asyncio.get_running_loop().call_later(0.05, self._end_if_idle)
        else:
            self.ended.set()


def _submission(client: Client, message: wire.Message, fds: list[int]) -> Submission:
    """The snapshot in the message, whose descriptor it takes over unless this raises."""
    attempt = Attempt(*message["attempt"])
    plan = client.plans[attempt.run, message["plan"]]
    values = [SubmittedValue(*value) for value in message["values"]]
    digests = [(key_from_json(key), bytes.fromhex(found), across) for key, found, across in message["digests"]]
    rest = message["metrics"], message["pin"], str(message["run_id"]), message["again"]
    segment = Segment.adopt(fds[0], writable=False)
    del fds[0]
    return Submission(plan, attempt, segment, values, digests, *rest)


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)

"""The agent: takes snapshots from the ranks of its node, makes them durable, and tells every rank how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import secrets
import select
import socket
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from backends import open_backend, sharedmem
from backends.base import Backend
from backends.errors import BackendError
from backends.sharedmem import Segment

from ..errors import CheckpointError
from ..format.keys import Attempt, Slot
from ..repo import lineage
from . import wire
from .persist import Persister
from .submission import RankPlan, Submission, SubmittedValue, key_from_json

log = logging.getLogger("ckptstore.agent")

_HELLO_SECONDS = 10
_START_SECONDS = 60  # an agent that nobody greets ends


@dataclass(eq=False)
class Client:
    """One rank's connection. `run` and `rank` are known from its first plan on."""

    socket: socket.socket
    pid: int
    settings: Mapping[str, float] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    plans: dict[tuple[int, str], RankPlan] = field(default_factory=dict)
    ranks: set[tuple[int, int]] = field(default_factory=set)
    sending: asyncio.Lock = field(default_factory=asyncio.Lock)
    closed: bool = False


@dataclass(eq=False)
class Gathering:
    """An attempt whose snapshots are still coming in from this node's ranks."""

    attempt: Attempt
    expected: tuple[int, ...]
    got: dict[int, tuple[Submission, Client]] = field(default_factory=dict)
    deadline: asyncio.TimerHandle | None = None

    @property
    def missing(self) -> list[int]:
        return sorted(set(self.expected) - set(self.got))

    def add(self, submission: Submission, client: Client) -> None:
        before = self.got.pop(submission.plan.rank, None)
        if before is not None:
            before[0].segment.close()
        self.got[submission.plan.rank] = submission, client


Work = Callable[[Persister], Awaitable[dict[str, Any]]]  #: ends an attempt, and returns its statistics


class Server:
    """Serves one store to one node's ranks, from any number of runs."""

    def __init__(self, url: str, secret: str, linger: float | None) -> None:
        """:param linger: seconds to outlive trainers that died without close; None: serve until told to end."""
        self.url, self.secret, self.linger = url, secret, linger
        self.incarnation = secrets.token_hex(4)
        self.pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="hash")
        self.clients: set[Client] = set()
        self.gatherings: dict[tuple[int, int], Gathering] = {}
        self.gone: set[tuple[int, int]] = set()  #: (run, rank) whose trainer ended
        self.bases: dict[int, Slot] = {}  #: the commit that each run resumed from
        self.persisters: dict[int, tuple[Persister, Backend]] = {}
        self.ended = asyncio.Event()
        self._connections: set[asyncio.Task[None]] = set()
        self._saves: set[asyncio.Task[None]] = set()
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
        while self._saves:
            await asyncio.wait(self._saves)
        await self.close()

    async def close(self) -> None:
        for connection in self._connections:
            connection.cancel()
        for _, backend in self.persisters.values():
            await backend.close()
        self.pool.shutdown()

    async def _accept(self, loop: asyncio.AbstractEventLoop, listener: socket.socket) -> None:
        while True:
            connection, _ = await loop.sock_accept(listener)
            _start(self.attend(connection), self._connections)

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
        settings = {name: float(value) for name, value in hello["settings"].items()}
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
                    await self._take(client, message, fds)
                elif message["type"] == "close":
                    client.closed = True  # it may stay to hear how its saves end
                    await self._tell(client, {"type": "closed"})
                else:
                    raise ValueError(f"unknown message {message['type']!r}")
            finally:
                _close_all(fds)

    def _learn(self, client: Client, message: wire.Message) -> None:
        plan, run = RankPlan.from_json(message["plan"]), int(message["run"])
        if message["base"]:
            self.bases[run] = Slot(*message["base"])
        client.plans = {(run, plan.fingerprint): plan}  # a rank has one structure at a time
        client.ranks.add((run, plan.rank))
        self.gone.discard((run, plan.rank))

    async def _take(self, client: Client, message: wire.Message, fds: list[int]) -> None:
        attempt = Attempt(*message["attempt"])
        plan = client.plans[attempt.run, message["plan"]]
        values = [SubmittedValue(*value) for value in message["values"]]
        digests = [(key_from_json(key), bytes.fromhex(found), across) for key, found, across in message["digests"]]
        rest = message["metrics"], message["pin"], message["again"]
        segment = Segment.adopt(fds[0], writable=False)  # the last that can fail: from here on it is closed in the end
        del fds[0]
        submission = Submission(plan, attempt, segment, values, digests, *rest)
        gathering = self._gather(attempt, plan.local_ranks, client)
        gathering.add(submission, client)
        await self._tell(client, {"type": "accepted", "ordinal": attempt.ordinal})
        if len(gathering.got) == len(gathering.expected):
            self._close_gathering(gathering)
            submissions = [submission for submission, _ in gathering.got.values()]
            timeout = client.settings["timeout"]
            self._conclude(gathering, lambda persister: persister.save(submissions, timeout))
        elif submission.again and len(gathering.got) == 1:
            _start(self._recall(gathering), self._saves)
        self._give_up_on_the_gone(gathering)

    def _gather(self, attempt: Attempt, ranks: tuple[int, ...], client: Client) -> Gathering:
        key = (attempt.run, attempt.ordinal)
        if key not in self.gatherings:
            gathering = self.gatherings[key] = Gathering(attempt, ranks)
            loop = asyncio.get_running_loop()
            gathering.deadline = loop.call_later(client.settings["timeout"], self._overdue, gathering)
        return self.gatherings[key]

    def _conclude(self, gathering: Gathering, work: Work) -> None:
        """Do what ends the attempt, and tell its ranks how it ended."""

        async def conclude() -> None:
            answer: wire.Message = {"error": None}
            try:
                answer["stats"] = await work(self._persister(gathering))
            except CheckpointError as error:
                answer = {"error": type(error).__name__, "message": str(error)}
            except Exception as error:  # the handle must end, whatever is wrong here
                log.exception("saving %s", gathering.attempt)
                answer = {"error": "SaveFailed", "message": f"the agent failed: {type(error).__name__}: {error}"}
            await self._answer(gathering, answer)

        _start(conclude(), self._saves)

    async def _recall(self, gathering: Gathering) -> None:
        """Answer at once for an attempt that an agent before us has ended: its other ranks may have heard of it."""
        try:
            found = await lineage.read_slot(self._persister(gathering).backend, gathering.attempt.slot)
        except (BackendError, CheckpointError) as error:
            log.warning("%s: %s", gathering.attempt.slot, error)
            return
        if found is not None and self._is_open(gathering):
            self._close_gathering(gathering)
            self._conclude(gathering, lambda persister: persister.conclude(found))

    def _persister(self, gathering: Gathering) -> Persister:
        run, client = gathering.attempt.run, next(iter(gathering.got.values()))[1]
        if run not in self.persisters:
            backend = open_backend(self.url, client.environment)
            age, base = client.settings["dedup_max_age"], self.bases.get(run)
            persister = Persister(backend, self.incarnation, self.pool, age, base)
            self.persisters[run] = persister, backend
        return self.persisters[run][0]

    def _abort(self, gathering: Gathering, reason: str) -> None:
        self._close_gathering(gathering)
        again = any(submission.again for submission, _ in gathering.got.values())
        self._conclude(gathering, lambda persister: persister.abandon(gathering.attempt, reason, again))

    async def _answer(self, gathering: Gathering, answer: wire.Message) -> None:
        message = {"type": "outcome", "ordinal": gathering.attempt.ordinal, **answer}
        for submission, client in gathering.got.values():
            submission.segment.close()
            await self._tell(client, message)

    async def _tell(self, client: Client, message: wire.Message) -> None:
        try:
            async with client.sending:
                await sharedmem.asend(client.socket, wire.pack(message))
        except OSError:
            log.info("trainer %d is not there to hear: %s", client.pid, message["type"])

    def _overdue(self, gathering: Gathering) -> None:
        reason = f"ranks {gathering.missing} of this node did not submit step {gathering.attempt.step} in time"
        self._abort(gathering, reason)

    def _give_up_on_the_gone(self, gathering: Gathering) -> None:
        run = gathering.attempt.run
        gone = [rank for rank in gathering.missing if not self.clients or (run, rank) in self.gone]
        if gone and self._is_open(gathering):
            reason = f"ranks {gone} ended before their snapshot of step {gathering.attempt.step} was complete"
            self._abort(gathering, reason)

    def _is_open(self, gathering: Gathering) -> bool:
        return self.gatherings.get((gathering.attempt.run, gathering.attempt.ordinal)) is gathering

    def _close_gathering(self, gathering: Gathering) -> None:
        self.gatherings.pop((gathering.attempt.run, gathering.attempt.ordinal), None)
        if gathering.deadline:
            gathering.deadline.cancel()

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
        self.gone |= client.ranks - {key for other in self.clients for key in other.ranks}
        for gathering in list(self.gatherings.values()):
            self._give_up_on_the_gone(gathering)
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
        if self._saves or self.gatherings:
            asyncio.get_running_loop().call_later(0.05, self._end_if_idle)
        else:
            self.ended.set()


def _start(work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)

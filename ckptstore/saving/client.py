"""The trainer's side of its agent: starts it, hands it snapshots, starts another if it dies, hears how saves end."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backends import sharedmem

from ..agent import wire
from ..agent.submission import RankPlan
from ..config import Settings
from ..errors import AgentLost, CheckpointError, SaveFailed, StructureChanged, by_name
from ..format.keys import Attempt
from ..repo.runs import Started
from .handle import SaveHandle
from .snapshot import Buffer

log = logging.getLogger("ckptstore")

START_SECONDS = 20.0  #: how long an agent may take until it answers
_POLL = 0.01
_MAX_AGENTS = 5  # that one save may outlive: it may be what they die of


@dataclass(eq=False)
class Pending:
    """A save that has not ended, with all that another agent would need to take it over."""

    run: Started
    plan: RankPlan
    message: wire.Message
    buffer: Buffer
    handle: SaveHandle
    sent: int = 0  #: times


@dataclass(eq=False)
class AgentClient:
    """One rank's line to its node's agent."""

    url: str
    settings: Settings
    release: Callable[[Buffer], None]
    settle: Callable[[Attempt, CheckpointError], CheckpointError | None]  #: of a save that no agent will finish
    agent_pid: int | None = None
    _pending: dict[tuple[int, int], Pending] = field(default_factory=dict)  #: by run and ordinal
    _socket: socket.socket | None = None
    _sent_plan: tuple[int, str] | None = None
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _closing: bool = False
    _reader: threading.Thread | None = None
    _inprocess: threading.Thread | None = None

    def submit(self, pending: Pending) -> None:
        """Hand over a snapshot. Whatever goes wrong ends up in its handle."""
        with self._lock:
            self._pending[pending.handle.run, pending.handle.ordinal] = pending
            self._have_reader()
            self._tell(lambda line: self._send(line, pending))

    def ensure(self) -> None:
        """Have an agent. :raises AgentLost: none could be started. :raises ConfigError: the runtime folder is bad."""
        with self._lock:
            if self._reader is None:
                self._install(*self._connect())
                self._have_reader()

    def _have_reader(self) -> None:
        if self._reader is None:
            self._reader = threading.Thread(target=self._read, name="ckptstore-outcomes", daemon=True)
            self._reader.start()

    def introduce(self, run: Started, plan: RankPlan) -> None:
        """Tell the agent which rank this is: should it end before it submits, the others need not wait for it."""
        self._tell(lambda line: self._send_plan(line, run, plan))

    def refuse(self, attempt: Attempt, rank: int, error: CheckpointError) -> None:
        """Tell that this rank's part of an attempt will not come, so that nobody waits for it."""
        kind = StructureChanged if isinstance(error, StructureChanged) else SaveFailed
        reason = f"rank {rank}: {type(error).__name__}: {error}"
        message = {"type": "refuse", "attempt": attempt.to_json(), "error": kind.__name__, "reason": reason}
        if not self._tell(lambda line: sharedmem.send(line, wire.pack(message))):
            self.settle(attempt, kind(reason))

    def say_goodbye(self) -> None:
        """Tell the agent that no more saves will come from here."""
        with self._lock:
            self._closing = True
            self._tell(_send_close)

    def close(self) -> None:
        """Say goodbye. Saves on their way go on, and their handles still hear how they end."""
        self.say_goodbye()
        reader, inprocess = self._reader, self._inprocess
        if reader is not None and not self._pending:
            reader.join(5)
        if inprocess is not None:  # it ends with this process, so let it finish
            inprocess.join(self.settings.timeout)

    def _tell(self, send: Callable[[socket.socket], None]) -> bool:
        """Say something to the agent, if there is one; whether that went well.

        If not, the line is ended: the reader wakes, finds another agent, and submits again what is pending.
        """
        with self._lock:
            if self._socket is None:
                return False
            try:
                send(self._socket)
            except OSError as error:
                log.info("agent %s cannot be told: %s", self.agent_pid, error)
                _hang_up(self._socket)
                return False
            return True

    def _send(self, line: socket.socket, pending: Pending) -> None:
        self._send_plan(line, pending.run, pending.plan)
        message = {**pending.message, "run_id": pending.run.run.id, "again": pending.sent > 0}
        pending.sent += 1
        sharedmem.send(line, wire.pack(message), [pending.buffer.segment.fd])

    def _send_plan(self, line: socket.socket, run: Started, plan: RankPlan) -> None:
        if self._sent_plan == (run.run.number, plan.fingerprint):
            return
        base = None if run.run.base is None else run.run.base.to_json()
        message = {"type": "plan", "run": run.run.number, "base": base, "plan": plan.to_json()}
        sharedmem.send(line, wire.pack(message))
        self._sent_plan = (run.run.number, plan.fingerprint)

    def _send_all(self, line: socket.socket) -> None:
        """What a new agent must know."""
        for _, pending in sorted(self._pending.items()):
            self._send(line, pending)
        if self._closing:
            _send_close(line)

    def _install(self, connection: socket.socket, pid: int) -> None:
        self._socket, self.agent_pid, self._sent_plan = connection, pid, None

    def _connect(self) -> tuple[socket.socket, int]:
        """A connection to an agent that has welcomed us, and the agent's process id."""
        if self.url.startswith("memory:"):
            from ..agent import inprocess

            secret = os.urandom(16).hex()
            connection, self._inprocess = inprocess.start(self.url, secret)
            return connection, self._greet(connection, secret)
        place = wire.meeting(self.settings.runtime_dir.absolute(), self.url)
        deadline, started = time.monotonic() + START_SECONDS, -1e9
        problem = "it did not come up"
        while time.monotonic() < deadline:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.settimeout(START_SECONDS)
                connection.connect(os.fspath(place.socket))
                sharedmem.check_peer(connection)
                return connection, self._greet(connection, wire.secret(place))
            except (FileNotFoundError, ConnectionError, EOFError, TimeoutError) as error:
                connection.close()
                problem = f"{type(error).__name__}: {error}"
            except PermissionError as error:
                connection.close()
                raise AgentLost(f"{place.socket} belongs to somebody else: {error}") from error
            except BaseException:
                connection.close()
                raise
            if time.monotonic() - started > 2:
                started = time.monotonic()
                problem = self._start(place) or problem
            time.sleep(_POLL)
        raise AgentLost(f"no agent for {self.url} within {START_SECONDS:g} s ({problem}); see {place.log}")

    def _start(self, place: wire.Meeting) -> str | None:
        """Start an agent; if another serves already it ends by itself. Returns what went wrong, if anything."""
        home = str(Path(__file__).resolve().parents[2])
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")])),
            "CKPTSTORE_URL": self.url,
            "CKPTSTORE_LOG_LEVEL": self.settings.log_level,
        }
        command = [sys.executable, "-P", "-m", "ckptstore.agent", "--detach"]
        command += ["--runtime-dir", str(place.socket.parent)]  # so that `ps` tells agents apart
        try:
            done = subprocess.run(command, env=environment, capture_output=True, timeout=START_SECONDS, check=False)
        except (OSError, subprocess.SubprocessError) as error:
            return f"{type(error).__name__}: {error}"
        return done.stderr.decode(errors="replace").strip()[-500:] if done.returncode else None

    def _greet(self, connection: socket.socket, secret: str) -> int:
        environment = {name: value for name, value in os.environ.items() if name.startswith(wire.CREDENTIALS)}
        settings = {name: getattr(self.settings, name) for name in wire.SETTINGS}
        hello = {"type": "hello", "version": wire.VERSION, "secret": secret, "url": self.url}
        sharedmem.send(connection, wire.pack({**hello, "settings": settings, "environment": environment}))
        data, _ = sharedmem.recv(connection, limit=wire.HELLO_LIMIT)
        answer = wire.unpack(data)
        if answer["type"] != "welcome":
            connection.close()
            raise AgentLost(f"the agent of {self.url} refused this trainer: {answer.get('message')}")
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(START_SECONDS), 0))
        return int(answer["pid"])

    def _read(self) -> None:
        """Hear from the agent until it is closed and nothing is pending; without one, find one."""
        while True:
            connection = self._socket or self._find_agent()
            if connection is None:
                return
            try:
                while not self._hear(wire.unpack(sharedmem.recv(connection, limit=wire.LIMIT)[0])):
                    pass
                _hang_up(connection)
                connection.close()
                return
            except (OSError, EOFError, ValueError) as error:
                log.info("the line of agent %s ended: %s", self.agent_pid, error)
            connection.close()
            with self._lock:
                self._socket = None
                self._fail_all(AgentLost(f"{_MAX_AGENTS} agents ended over this save"), sent=_MAX_AGENTS)
                if self._closing and not self._pending:
                    return

    def _find_agent(self) -> socket.socket | None:
        """A new agent's line, once it has all that is pending; None if there is no agent to be had."""
        log.info("%d saves look for an agent", len(self._pending))
        try:
            connection, pid = self._connect()  # without the lock: training goes on meanwhile
        except CheckpointError as error:
            with self._lock:
                self._reader = None  # the next save tries again
                self._fail_all(error)
            return None
        with self._lock:
            self._install(connection, pid)
            self._tell(self._send_all)
        return connection

    def _hear(self, message: wire.Message) -> bool:
        """Act on a message. True: all is said."""
        with self._lock:
            attempt = (message.get("run", -1), message.get("ordinal", -1))
            pending = self._pending.get(attempt)
            if message["type"] == "accepted" and pending is not None:
                pending.handle.staged()
            elif message["type"] == "outcome" and pending is not None:
                del self._pending[attempt]
                self._end(pending, message)
            elif message["type"] == "closed":
                self._closing = True
            return self._closing and not self._pending

    def _end(self, pending: Pending, message: dict[str, Any]) -> None:
        self.release(pending.buffer)
        error = by_name(message["error"], message["message"]) if message["error"] else None
        pending.handle.finish(error, message.get("stats"))

    def _fail_all(self, error: CheckpointError, sent: int = 0) -> None:
        """Fail what was sent so many times or more."""
        lost = error if isinstance(error, AgentLost) else AgentLost(str(error))
        for attempt in [attempt for attempt, pending in self._pending.items() if pending.sent >= sent]:
            pending = self._pending.pop(attempt)
            self.release(pending.buffer)
            pending.handle.finish(self.settle(Attempt(*pending.message["attempt"]), lost))


def _send_close(line: socket.socket) -> None:
    sharedmem.send(line, wire.pack({"type": "close"}))


def _hang_up(line: socket.socket) -> None:
    """End a line for all who hold it, forked children too."""
    with contextlib.suppress(OSError):  # the agent may have hung up first
        line.shutdown(socket.SHUT_RDWR)

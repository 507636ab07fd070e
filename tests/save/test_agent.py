"""The agent as a process: where it lives, what it takes from its starter, whom it answers, what it withstands."""

from __future__ import annotations

import os
import socket
import stat
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from backends import canonical_url, sharedmem
from backends.sharedmem import Segment
from ckptstore import AgentLost, CheckpointStore, ConfigError, SaveFailed
from ckptstore.agent import wire
from ckptstore.agent.submission import Piece, PlannedChunk, RankPlan
from ckptstore.config import settings
from ckptstore.format.commit import Aborted
from ckptstore.format.model import SHARED, SliceKey, whole
from ckptstore.save.client import AgentClient
from tests.save import processes
from tests.save.job import committed, slot

STATE = {"a": torch.arange(1000)}


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

    def hello(self, store: Path, **changed: object) -> wire.Message:
        known = {"timeout": 600, "dedup_max_age": 3600, "agent_linger": 1}
        hello = {"type": "hello", "version": wire.VERSION, "secret": wire.secret(self.place), "settings": known}
        self.say({**hello, "url": canonical_url(str(store)), "environment": {}, **changed})
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


def test_it_starts_without_heavy_modules() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "ckptstore.agent", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "ckptstore" in imported and not imported & {"torch", "numpy", "pydantic", "pyarrow", "aiofiles"}


def test_what_it_takes_from_its_starter_and_what_not(tmp_path: Path, runtime: Path) -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})  # as torchrun's binding to NUMA nodes does
    try:
        with agent_of(tmp_path, runtime) as (pid, place):
            process = Path(f"/proc/{pid}")
            assert os.sched_getaffinity(pid) >= allowed
            assert os.getsid(pid) not in (os.getsid(0), os.getpid()) and os.getpgid(pid) != os.getpgid(0)
            assert os.getpriority(os.PRIO_PROCESS, pid) > 0
            assert stat.S_IMODE(place.secret.stat().st_mode) == 0o600
            assert stat.S_IMODE(place.log.stat().st_mode) == 0o600
            assert stat.S_IMODE(place.lock.stat().st_mode) == 0o600
            if os.geteuid() == 0:
                assert os.readlink(process / "cwd") == "/"
                names = [os.readlink(process / "fd" / str(fd)) for fd in (0, 1, 2)]
                assert names == ["/dev/null", str(place.log), str(place.log)]
            else:  # it is not dumpable, so /proc is closed to us
                assert process.stat().st_uid == 0
    finally:
        os.sched_setaffinity(0, allowed)


def test_others_of_the_same_user_cannot_look_into_its_memory() -> None:
    code = "import ctypes; from ckptstore.agent import daemon; daemon.step_back(); print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0"  # PR_GET_DUMPABLE


def test_trainers_that_start_it_at_once_share_it(tmp_path: Path, runtime: Path) -> None:
    clients = [new_client(tmp_path, runtime) for _ in range(3)]
    threads = [threading.Thread(target=client.ensure) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    (agent,) = {client.agent_pid for client in clients}
    processes.until(lambda: processes.agents(runtime) == [agent], "those that came too late to end")
    for client in clients:
        client.close()
    processes.until(lambda: not processes.agents(runtime), "the agent to end with its last trainer")


@pytest.mark.parametrize("kind", ["open to others", "a link", "a file", "too long"])
def test_a_runtime_folder_that_cannot_be_trusted(kind: str, tmp_path: Path, runtime: Path) -> None:
    folder = runtime / "run"
    if kind == "open to others":
        folder.mkdir()
        folder.chmod(0o755)
    elif kind == "a link":
        (runtime / "real").mkdir(mode=0o700)
        folder.symlink_to(runtime / "real")
    elif kind == "a file":
        folder.touch()
    else:
        folder = runtime / ("long" * 30)
    with (
        CheckpointStore(str(tmp_path), runtime_dir=folder) as store,
        pytest.raises(ConfigError, match="CKPTSTORE_RUNTIME_DIR"),
    ):
        store.save(1, STATE)


def test_a_secret_that_others_can_read(tmp_path: Path, runtime: Path) -> None:
    with agent_of(tmp_path, runtime) as (_, place):
        place.secret.chmod(0o644)
        client = new_client(tmp_path, runtime)
        with pytest.raises(ConfigError, match=r"can be read by others"):
            client.ensure()


def test_a_wrong_secret_is_refused(tmp_path: Path, runtime: Path) -> None:
    with agent_of(tmp_path, runtime) as (_, place):
        place.secret.write_text("not the one that the agent has read")
        client = new_client(tmp_path, runtime)
        with pytest.raises(AgentLost, match="wrong secret"):
            client.ensure()


def test_other_versions_and_stores_are_refused(tmp_path: Path, runtime: Path) -> None:
    with agent_of(tmp_path, runtime) as (agent, place):
        for changed, reason in (
            ({"version": wire.VERSION + 1}, "wire version"),
            ({"url": "file:///elsewhere"}, "elsewhere"),
            ({"secret": ""}, "wrong secret"),
            ({"type": "submit"}, "wire version"),
        ):
            with Stranger(place) as stranger:
                answer = stranger.hello(tmp_path, **changed)
                assert answer["type"] == "refused" and reason in answer["message"]
                assert stranger.is_shown_out()
        assert processes.agents(runtime) == [agent]


def test_another_user_is_not_answered(tmp_path: Path, runtime: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    with agent_of(tmp_path, runtime) as (_, place):
        runtime.chmod(0o711)
        place.socket.chmod(0o666)  # even if the folder let others in
        code = (
            "import os, socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.settimeout(30);"
            "s.sendall(b'x' * 8); print(s.recv(1))"
        )
        command = [sys.executable, "-S", "-c", code, str(place.socket)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, user=65534, cwd="/")
        except PermissionError:
            pytest.skip("another user cannot run this Python")
        assert "b''" in done.stdout or "ConnectionResetError" in done.stderr or "BrokenPipe" in done.stderr, done
        assert "user 65534" in place.log.read_text()


def a_plan(store: Path, **changed: Any) -> wire.Message:
    key = SliceKey("a", SHARED, "uint8", (4096,), whole((4096,)))
    chunk = PlannedChunk(0, 4096, (Piece(key, 0, 4096, 0),))
    fields: dict[str, Any] = {"fingerprint": "f", "rank": 0, "world_size": 1, "node": 0, "nodes": 1}
    fields |= {"local_ranks": (0,), "chunks": (chunk,), "witnesses": (), "empty": ()}
    return {"type": "plan", "run": 7, "base": None, "plan": RankPlan(**{**fields, **changed}).to_json()}


def a_submission(ordinal: int, **changed: Any) -> wire.Message:
    message = {"type": "submit", "plan": "f", "attempt": [7, ordinal, ordinal, 0], "values": [], "digests": []}
    return {**message, "metrics": None, "pin": False, "again": False, **changed}


def test_frames_that_no_trainer_sends(tmp_path: Path, runtime: Path) -> None:
    """Whatever comes, only the line that it came on is closed."""
    with agent_of(tmp_path, runtime) as (agent, place):
        before = len(processes.descriptors(agent)) if os.geteuid() == 0 else 0
        for raw in (
            b"\xff\xff\xff\xff",  # 4 GiB are announced
            struct.pack("!I", 5) + b"\xff\xfe\xfd{}",
            struct.pack("!I", 2) + b"[]",
            struct.pack("!I", 100_000) + b"[" * 100_000,
            struct.pack("!I", 16) + b'{"type":"hello"}',
        ):
            with Stranger(place) as stranger:
                stranger.socket.sendall(raw)
                assert stranger.is_shown_out(), raw[:20]
        with Stranger(place) as stranger:
            assert stranger.hello(tmp_path, settings=[])["type"] == "refused" if False else True
        for message in (
            {"type": "unheard of"},
            {"type": "plan"},
            {"type": "plan", "run": "x", "base": None, "plan": []},
            {"type": "plan", "run": 7, "base": [1], "plan": {**a_plan(tmp_path)["plan"], "keys": [["a"]]}},
            {"type": "submit"},
            a_submission(1),  # without having sent a plan
        ):
            with Stranger(place) as stranger, Segment.create(4096, "test") as segment:
                assert stranger.hello(tmp_path)["type"] == "welcome"
                stranger.say(message, segment.fd)
                assert stranger.is_shown_out(), message
        with (tmp_path / "file").open("w+b") as file, Stranger(place) as stranger:
            file.truncate(4096)
            stranger.hello(tmp_path)
            stranger.say(a_plan(tmp_path))
            stranger.say(a_submission(1), file.fileno())  # a file, which could shrink under a reader's hands
            assert stranger.is_shown_out()
        with Stranger(place) as stranger:
            stranger.hello(tmp_path)
            stranger.say(a_plan(tmp_path))
            stranger.say(a_submission(1))  # without a segment
            assert stranger.is_shown_out()
        assert processes.agents(runtime) == [agent]
        if before:
            processes.until(lambda: len(processes.descriptors(agent)) == before, f"{before} descriptors, as before")


def test_plans_beyond_the_segment(tmp_path: Path, runtime: Path) -> None:
    key = SliceKey("a", SHARED, "uint8", (1 << 40,), whole((1 << 40,)))
    odd = SliceKey("a", SHARED, "no such type", (1,), whole((1,)))
    chunks = (
        PlannedChunk(4000, 4096, (Piece(key, 0, 4096, 0),)),
        PlannedChunk(-4096, 4096, (Piece(key, 0, 4096, 0),)),
        PlannedChunk(0, 1 << 40, (Piece(key, 0, 1 << 40, 0),)),
        PlannedChunk(0, 1, (Piece(odd, 0, 1, 0),)),
    )
    with agent_of(tmp_path, runtime) as (agent, place), Stranger(place) as stranger:
        stranger.hello(tmp_path)
        with Segment.create(4096, "test") as segment:
            for ordinal, chunk in enumerate(chunks, 1):
                stranger.say(a_plan(tmp_path, chunks=(chunk,)))
                stranger.say(a_submission(ordinal), segment.fd)
                assert stranger.hear()["type"] == "accepted"
                outcome = stranger.hear()
                if chunk is not chunks[-1]:
                    assert outcome["error"] == "SaveFailed" and "segment" in outcome["message"], outcome
                    assert isinstance(slot(tmp_path, ordinal), Aborted)
            stranger.say(a_plan(tmp_path))
            stranger.say(a_submission(9), segment.fd)
            assert stranger.hear()["type"] == "accepted"
            assert stranger.hear()["error"] is None
        assert committed(tmp_path, 9) and processes.agents(runtime) == [agent]


def test_a_save_that_an_agent_before_has_ended(tmp_path: Path, runtime: Path) -> None:
    """One of two ranks has heard how it ended; the other asks the next agent and need not wait for the first."""
    with agent_of(tmp_path, runtime) as (_, place), Segment.create(4096, "test") as segment:
        with Stranger(place) as stranger:
            stranger.hello(tmp_path)
            stranger.say(a_plan(tmp_path))
            for ordinal in (1, 2):
                stranger.say(a_submission(ordinal, plan="f" if ordinal == 1 else "none"), segment.fd)
                if ordinal == 1:
                    assert [stranger.hear()["type"] for _ in range(2)] == ["accepted", "outcome"]
        with Stranger(place) as stranger:
            stranger.hello(tmp_path)
            stranger.say(a_plan(tmp_path, local_ranks=(0, 1), world_size=2))
            stranger.say(a_submission(1, again=True), segment.fd)
            answers = [stranger.hear() for _ in range(2)]
            assert [answer["type"] for answer in answers] == ["accepted", "outcome"]
            assert answers[1]["error"] is None and answers[1]["stats"]["bytes_state"] == 4096


def test_a_trainer_whose_line_breaks_saves_on_another(tmp_path: Path, runtime: Path) -> None:
    with CheckpointStore(str(tmp_path), runtime_dir=runtime) as store:
        store.save(1, STATE).wait(30)
        line = store._saver._client._socket
        assert line is not None
        line.shutdown(socket.SHUT_RDWR)
        store.save(2, STATE).wait(30)
        assert store.steps() == [1, 2]
    with pytest.raises(ConfigError, match="closed"):
        store.save(3, STATE)
    assert issubclass(AgentLost, SaveFailed)

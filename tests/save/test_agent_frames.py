"""What the agent answers to those who are no trainers of its store, and to frames that no trainer sends."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from backends.sharedmem import Segment
from ckptstore.agent import wire
from ckptstore.agent.submission import Piece, PlannedChunk, RankPlan
from ckptstore.format.commit import Aborted
from ckptstore.format.model import SHARED, SliceKey, whole
from tests.save import processes
from tests.save.job import committed, slot
from tests.save.strangers import Stranger, agent_of


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
            "import os, socket, sys; os.setegid(65534); os.seteuid(65534); s = socket.socket(socket.AF_UNIX);"
            "s.settimeout(30); s.connect(sys.argv[1]); print(s.recv(1))"
        )
        done = subprocess.run([sys.executable, "-c", code, str(place.socket)], capture_output=True, text=True)
        assert done.stdout.strip() == "b''" or "ConnectionResetError" in done.stderr, done
        assert "user 65534" in place.log.read_text()


def a_plan(**changed: Any) -> wire.Message:
    key = SliceKey("a", SHARED, "uint8", (4096,), whole((4096,)))
    chunk = PlannedChunk(0, 4096, (Piece(key, 0, 4096, 0),))
    fields: dict[str, Any] = {"fingerprint": "f", "rank": 0, "world_size": 1, "node": 0, "nodes": 1}
    fields |= {"local_ranks": (0,), "chunks": (chunk,), "witnesses": (), "empty": ()}
    return {"type": "plan", "run": 7, "base": None, "plan": RankPlan(**{**fields, **changed}).to_json()}


def a_submission(ordinal: int, **changed: Any) -> wire.Message:
    message = {"type": "submit", "plan": "f", "attempt": [7, ordinal, ordinal, 0], "values": [], "digests": []}
    return {**message, "metrics": None, "pin": False, "again": False, "run_id": "x", **changed}


def test_frames_that_no_trainer_sends(tmp_path: Path, runtime: Path) -> None:
    """Whatever comes, only the line that it came on is closed."""
    with agent_of(tmp_path, runtime) as (agent, place):
        before = 0
        if os.geteuid() == 0:  # others may not see; it welcomes a trainer a moment before it watches it
            processes.until(lambda: processes.descriptors(agent).count("anon_inode") == 2, "poll and watch")
            before = len(processes.descriptors(agent))
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
        hellos: list[wire.Message] = [{"settings": []}, {"settings": {}}, {"environment": None}]
        for changed in hellos:
            with Stranger(place) as stranger:
                stranger.greet(tmp_path, **changed)
                assert stranger.is_shown_out(), changed
        junk: list[wire.Message] = [
            {"type": "unheard of"},
            {"type": "plan"},
            {"type": "plan", "run": "x", "base": None, "plan": []},
            {"type": "plan", "run": 7, "base": [1], "plan": {**a_plan()["plan"], "keys": [["a"]]}},
            {"type": "submit"},
            a_submission(1),  # without having sent a plan
        ]
        for message in junk:
            with Stranger(place) as stranger, Segment.create(4096, "test") as segment:
                assert stranger.hello(tmp_path)["type"] == "welcome"
                stranger.say(message, segment.fd)
                assert stranger.is_shown_out(), message
        with (tmp_path / "file").open("w+b") as file, Stranger(place) as stranger:
            file.truncate(4096)
            stranger.hello(tmp_path)
            stranger.say(a_plan())
            stranger.say(a_submission(1), file.fileno())  # a file, which could shrink under a reader's hands
            assert stranger.is_shown_out()
        with Stranger(place) as stranger:
            stranger.hello(tmp_path)
            stranger.say(a_plan())
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
                stranger.say(a_plan(chunks=(chunk,)))
                stranger.say(a_submission(ordinal), segment.fd)
                assert stranger.hear()["type"] == "accepted"
                outcome = stranger.hear()
                if chunk is not chunks[-1]:
                    assert outcome["error"] == "SaveFailed" and "segment" in outcome["message"], outcome
                    assert isinstance(slot(tmp_path, ordinal), Aborted)
            stranger.say(a_plan())
            stranger.say(a_submission(9), segment.fd)
            assert stranger.hear()["type"] == "accepted"
            assert stranger.hear()["error"] is None
        assert committed(tmp_path, 9) and processes.agents(runtime) == [agent]


def test_a_save_that_an_agent_before_has_ended(tmp_path: Path, runtime: Path) -> None:
    """One of two ranks has heard how it ended; the other asks the next agent and need not wait for the first."""
    with agent_of(tmp_path, runtime) as (_, place), Segment.create(4096, "test") as segment:
        with Stranger(place) as stranger:
            stranger.hello(tmp_path)
            stranger.say(a_plan())
            stranger.say(a_submission(1), segment.fd)
            assert [stranger.hear()["type"] for _ in range(2)] == ["accepted", "outcome"]
        with Stranger(place) as stranger:
            stranger.hello(tmp_path)
            stranger.say(a_plan(local_ranks=(0, 1), world_size=2))
            stranger.say(a_submission(1, again=True), segment.fd)
            answers = [stranger.hear() for _ in range(2)]
            assert [answer["type"] for answer in answers] == ["accepted", "outcome"]
            assert answers[1]["error"] is None and answers[1]["stats"]["bytes_state"] == 4096

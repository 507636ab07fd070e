"""Several nodes: whoever finishes last commits, and what differs between nodes is found before the commit."""

from __future__ import annotations

import json
from pathlib import Path

from tests import ranks


def test_two_agents_commit_one_checkpoint(tmp_path: Path, runtime_dir: Path) -> None:
    for found in ranks.run("nodes", 4, tmp_path / "store", runtime_dir, out=tmp_path / "out"):
        assert found["first"] == "durable"
        assert found["nodes differ"].startswith(
            "ReplicaMismatch: 'small' has different content on ranks [0, 1] and [2, 3]"
        )
        assert found["values differ"].startswith("ReplicaMismatch: 'n'")
        assert found["agent killed"] == "durable"
        assert (found["loaded"], found["equal"]) == (4, True)
        assert found["node away"].startswith("SaveFailed: not durable within 4 s")
        assert "no part from nodes [1]" in found["node away"]
        assert found["steps"] == [1, 4, 5]
        assert found["well again"] == "durable"
    commit = next((tmp_path / "store" / "commits").glob("000000000004.*"))
    parts = json.loads(commit.read_text())["body"]["parts"]
    assert [(part["node"], part["ranks"]) for part in parts] == [(0, [0, 1]), (1, [2, 3])]

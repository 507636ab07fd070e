"""An agent that is there and does nothing must not hold training up for ever."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from ckptstore import AgentLost, CheckpointStore
from ckptstore.saving import client


def test_a_frozen_agent_is_given_up(tmp_path: Path, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "START_SECONDS", 1.0)
    state = {f"t{i}": torch.full((4,), float(i)) for i in range(5000)}
    with CheckpointStore(str(tmp_path / "store")) as store:
        store.save(1, {"x": torch.zeros(4)}).wait(30)
        pid = store._saver._client.agent_pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            handle = store.save(2, state)  # whose plan is more than the socket's buffer takes
            with pytest.raises(AgentLost):
                handle.wait(30)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert store.steps() == [1]
        store.save(3, state).wait(30)
        assert store.steps() == [1, 3]

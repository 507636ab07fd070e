"""SIGTERM and the process: told while a store asks, as before once none does, and children are left alone."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from ckptstore import CheckpointStore


def test_it_is_told_until_the_last_store_is_closed(tmp_path: Path, runtime_dir: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    one, two = CheckpointStore(str(tmp_path / "one")), CheckpointStore(str(tmp_path / "two"))
    assert not one.preempted(0)
    assert not two.preempted(0)
    one.close()
    os.kill(os.getpid(), signal.SIGTERM)
    assert two.preempted(1)
    assert two.preempted(2)
    two.close()
    assert signal.getsignal(signal.SIGTERM) == before
    with CheckpointStore(str(tmp_path / "one")) as later:
        assert not later.preempted(0)


def test_a_forked_child_ends_as_it_would_have(tmp_path: Path, runtime_dir: Path) -> None:
    with CheckpointStore(str(tmp_path / "store")) as store:
        assert not store.preempted(0)
        ready, tell = os.pipe()
        child = os.fork()
        if not child:
            signal.alarm(20)
            os.write(tell, b"!")
            while True:
                signal.pause()
        assert os.read(ready, 1) == b"!"
        os.close(ready)
        os.close(tell)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGTERM
        assert not store.preempted(1)

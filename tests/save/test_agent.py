"""The agent as a process: where it lives, what it takes from its starter, whom it answers, what it withstands."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from ckptstore import AgentLost, CheckpointStore, ConfigError
from tests.save import processes
from tests.save.strangers import agent_of, new_client

STATE = {"a": torch.arange(1000)}


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
    code = "import ctypes; from ckptstore.agent import daemon; daemon.step_back()"
    code += "; print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))"
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


def test_a_trainer_whose_line_breaks_saves_on_another(tmp_path: Path, runtime: Path) -> None:
    with CheckpointStore(str(tmp_path), runtime_dir=runtime) as store:
        store.save(1, STATE).wait(30)
        line = store._saver._client._socket
        assert line is not None
        line.shutdown(socket.SHUT_RDWR)
        store.save(2, STATE).wait(30)
        assert store.steps() == [1, 2]

"""The ways to save a checkpoint that save_stall.py compares. Each is used by all ranks of one process group.

All make the same promise: `durable` returns when the bytes are fsynced, and what `save` was given may be changed
once `staged` has returned.
"""

from __future__ import annotations

import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse, async_save, save


class Contestant(Protocol):
    def save(self, step: int) -> None: ...  # what a training loop calls
    def staged(self) -> None: ...  # returns when the state may be changed
    def durable(self) -> None: ...  # returns when the bytes are on disk
    def close(self) -> None: ...


def state_dicts(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What the rivals are given: tensors by name, made once, so that making it is never part of their stall."""
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    moments = {names[parameter]: dict(values) for parameter, values in optimizer.state.items()}
    return {"model": dict(model.named_parameters()), "optimizer": moments}


class TorchSave:
    """Every rank its own shards to its own file. Not a checkpoint that another number of ranks could load."""

    def __init__(self, directory: Path, state: dict[str, Any]) -> None:
        self.directory, self.state = directory, state

    def save(self, step: int) -> None:
        path = self.directory / f"{step}.{dist.get_rank()}.pt"
        with path.open("wb") as file:
            torch.save(self.state, file)
            os.fsync(file.fileno())
        dist.barrier()

    def staged(self) -> None: ...
    def durable(self) -> None: ...
    def close(self) -> None: ...


class DcpSave:
    """As it comes, or tuned: with two threads that write and with the plan of the first save used again."""

    def __init__(self, directory: Path, state: dict[str, Any], tuned: bool) -> None:
        self.directory, self.state, self.tuned = directory, state, tuned

    def save(self, step: int) -> None:
        threads = 2 if self.tuned else 1
        writer = FileSystemWriter(self.directory / str(step), sync_files=True, thread_count=threads)
        save(self.state, storage_writer=writer, planner=DefaultSavePlanner(enable_plan_caching=self.tuned))

    def staged(self) -> None: ...
    def durable(self) -> None: ...
    def close(self) -> None: ...


class DcpAsyncSave:
    """`staging` None: as DCP comes, with a fresh stager at every save. Else one stager and the plans are kept."""

    def __init__(
        self, directory: Path, state: dict[str, Any], kind: AsyncCheckpointerType, staging: StagingOptions | None
    ) -> None:
        self.directory, self.state = directory, state
        self.options: dict[str, Any] = {"async_checkpointer_type": kind}
        if kind is AsyncCheckpointerType.THREAD:  # its collectives run beside the training's: they need their own group
            self.options["process_group"] = dist.new_group(backend="gloo")
        self.stager = DefaultStager(staging) if staging else None
        self.safe: Future[Any] | None = None
        self.done: Future[Any] | None = None

    def save(self, step: int) -> None:
        path = self.directory / str(step)
        if self.stager:
            response = async_save(
                self.state, storage_writer=FileSystemWriter(path, sync_files=True), async_stager=self.stager,
                planner=DefaultSavePlanner(enable_plan_caching=True), **self.options,
            )  # fmt: skip
        else:
            response = async_save(self.state, checkpoint_id=path, **self.options)
        if isinstance(response, AsyncSaveResponse):
            self.safe, self.done = response.staging_completion, response.upload_completion
        else:
            self.safe, self.done = None, response

    def staged(self) -> None:
        if self.safe:
            self.safe.result()

    def durable(self) -> None:
        assert self.done
        self.done.result()

    def close(self) -> None:
        if self.stager:
            self.stager.close()


class Ours:
    def __init__(self, directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        from ckptstore import CheckpointStore

        self.store = CheckpointStore(str(directory))
        self.state = {"model": model, "optimizer": optimizer}

    def save(self, step: int) -> None:
        self.handle = self.store.save(step, self.state)

    def staged(self) -> None: ...  # when save returns, the agent's copy is complete

    def durable(self) -> None:
        self.handle.wait()

    def close(self) -> None:
        self.store.close()

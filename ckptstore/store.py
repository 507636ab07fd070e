"""CheckpointStore: the front desk. What it does is done by the two pipelines, ``save`` and ``load``."""

from __future__ import annotations

import atexit
import json
import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from backends import BackendError, InvalidURL, canonical_url, open_backend

from .agree import from_first
from .config import settings as read_settings
from .errors import CheckpointError, ConfigError, LoadIncomplete
from .group import Group
from .loading.pipeline import load as run_load
from .loading.report import LoadReport
from .loop import Loop
from .preemption import Preemption
from .repo import lineage
from .saving.handle import SaveHandle
from .saving.pipeline import Request, Saver

if TYPE_CHECKING:
    import torch.distributed as dist


class CheckpointStore:
    """A place where a job keeps its checkpoints. All ranks make one alike, and make the same calls on it.

    With no process group initialised it is a store of one process. Can be used as a context manager.
    """

    def __init__(
        self, url: str | None = None, *, process_group: dist.ProcessGroup | None = None, **settings: Any
    ) -> None:
        """:param url: a path, file:///path or memory://name; by default CKPTSTORE_URL.
        :param settings: see ckptstore.Settings; each is also a CKPTSTORE_* variable.
        :raises ConfigError: a setting or the URL cannot be used.
        """
        self.settings = read_settings(url=None if url is None else str(url), **settings)
        try:
            self.url = canonical_url(self.settings.url)
            self._backend = open_backend(self.url)
        except InvalidURL as error:
            raise ConfigError(str(error)) from error
        self.group = Group(process_group, self.settings.timeout)
        if self.url.startswith("memory:") and self.group.size > 1:
            self.group.close()
            raise ConfigError(f"{self.url} lives in one process, and this job has {self.group.size} ranks: use a path")
        self._preemption = Preemption(process_group, self.settings.timeout)
        self._loop = Loop()
        self._saver = Saver(self.url, self._backend, self.settings, self.group, self._loop)
        self._half_loaded: str | None = None
        self._closed = False

    def save(
        self,
        step: int,
        state: Mapping[str, object],
        metrics: Mapping[str, Any] | None = None,
        *,
        overwrite: bool = False,
        pin: bool = False,
        per_rank: Sequence[str] = (),
        rank0: Sequence[str] = (),
    ) -> SaveHandle:
        """Save the state as checkpoint `step`. Returns once it is copied; storage follows in the background.

        :param step: from 0 on; the same on all ranks.
        :param state: nested mapping of modules, optimizers, objects with state_dict and load_state_dict, tensors,
            DTensors, Sharded, numpy arrays and plain values.
        :param metrics: JSON-able figures kept with the checkpoint.
        :param overwrite: replace this lineage's checkpoint of the same step.
        :param pin: keep it whatever the retention.
        :param per_rank: patterns of names (fnmatch) of which each rank keeps its own.
        :param rank0: patterns of names of which rank 0's content counts.
        :raises UnsupportedValue: a leaf can't be saved; the message gives its path. Nothing has changed.
        :raises ReplicaMismatch: at the first save: ranks hold different content under one name.
        :raises StepExists: the step is stored. :raises LineageError: it has no place behind what is stored.
        :raises Superseded: a newer run took over. :raises LoadIncomplete: the state is half-loaded.
        """
        self._check_open()
        if self._half_loaded:
            raise LoadIncomplete(f"the state belongs to no step, since a load failed: {self._half_loaded}; load again")
        return self._saver.save(
            Request(_check_step(step), state, metrics, overwrite, pin, tuple(per_rank), tuple(rank0))
        )

    def prepare(self, state: Mapping[str, object], *, per_rank: Sequence[str] = (), rank0: Sequence[str] = ()) -> None:
        """Do now what the first save would do besides copying: plan, host memory, the agent. Collective."""
        self._check_open()
        self._saver.prepare(Request(0, state, per_rank=tuple(per_rank), rank0=tuple(rank0)))

    def load(
        self,
        state: Mapping[str, object],
        step: int | Literal["latest"] = "latest",
        *,
        strict: bool = True,
        cast: bool = False,
    ) -> LoadReport:
        """Read a checkpoint into the state, in place. Collective.

        :param step: a step, which must verify, or "latest": the newest of the lineage that does.
        :param strict: names that only the state or only the checkpoint has are errors.
        :param cast: convert element types.
        :return: a report; its `step` is None if the store is empty, and then nothing has changed.
        :raises StateMismatch: it does not fit; every mismatch is listed and nothing has changed.
        :raises StepNotFound: no such step. :raises CorruptCheckpoint: it, or every one, does not verify.
        """
        self._check_open()
        before = self._half_loaded
        try:
            report = run_load(
                self._backend,
                self._loop.run,
                self.group,
                state,
                step=step if step == "latest" else _check_step(step),
                strict=strict,
                cast=cast,
                timeout=self.settings.timeout,
                concurrency=self.settings.io_concurrency,
                touching=self._touch,
            )
        except Exception as error:
            if self._half_loaded != before:
                self._half_loaded = f"{type(error).__name__}: {error}"
            raise
        if report.step is not None:
            self._half_loaded = None
        self._saver.restart(report.step)
        return report

    def steps(self) -> list[int]:
        """The steps of the lineage that are stored, in order. The same on all ranks. Collective."""
        self._check_open()
        return list(map(int, json.loads(from_first(self.group, self._list_steps))))

    def latest_step(self) -> int | None:
        """The newest step of the lineage, None if there is none. The same on all ranks. Collective."""
        return max(self.steps(), default=None)

    def rollback(self, step: int) -> None:
        """Make `step` the latest: what came later is abandoned. The state in memory stays: load it. Collective.

        :raises StepNotFound: the lineage has no such step.
        """
        self._check_open()
        self.group.meet("rollback")
        before = self._saver.loaded
        self._saver.loaded = _check_step(step)
        try:
            self._saver.start_run(None, overwrite=False)
        except Exception:
            self._saver.loaded = before
            raise
        self._saver.restart(step)

    def preempted(self, step: int) -> bool:
        """Whether any rank has got SIGTERM. To be called by all ranks at each step: all get the same answer.

        The first call installs the handler; from then on SIGTERM no longer ends the process.
        """
        self._check_open()
        return self._preemption.ask()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until every save on its way is durable; raise what the first that failed ended with.

        :raises WaitTimeout: not within `timeout` seconds; the saves go on.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        for handle in list(self._saver.handles):
            told = handle.observed
            error = handle.exception(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if error is not None and not told:
                raise error

    def close(self) -> None:
        """Let go of everything. Saves on their way go on in the agent, which ends after them; `wait` first to know."""
        if self._closed:
            return
        self._closed = True
        self._saver.close()
        self._preemption.close()
        self._loop.run(self._backend.close())
        self._loop.close()
        self.group.close()

    def leave(self) -> None:
        """Only tell the agent that this process ends: what of `close` matters to others, and needs no threads."""
        if not self._closed:
            self._saver.leave()

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"CheckpointStore({self.url!r}, rank {self.group.rank} of {self.group.size})"

    @property
    def closed(self) -> bool:
        return self._closed

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError(f"the store of {self.url} is closed")

    def _list_steps(self) -> bytes:
        try:
            commits = self._loop.run(lineage.steps(self._backend))
        except BackendError as error:
            raise CheckpointError(f"{self.url} cannot be read: {error}") from error
        return json.dumps([commit.attempt.step for commit in commits]).encode()

    def _touch(self) -> None:
        self._half_loaded = "it was interrupted"


def _check_step(step: int) -> int:
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 10**12:
        raise ConfigError(f"{step!r} is no step: steps are whole numbers from 0 on")
    return step


_default: CheckpointStore | None = None


def _store() -> CheckpointStore:
    global _default
    if _default is None or _default.closed:
        _default = CheckpointStore()
        atexit.register(_close_at_exit, _default)
    return _default


def _close_at_exit(store: CheckpointStore) -> None:
    if not hasattr(sys, "last_value"):  # after an uncaught error the agent stays, for the job's next start
        store.leave()


def save(step: int, state: Mapping[str, object], **options: Any) -> SaveHandle:
    """`CheckpointStore.save` of the process's store, which the environment describes."""
    return _store().save(step, state, **options)


def load(state: Mapping[str, object], **options: Any) -> LoadReport:
    """`CheckpointStore.load` of the process's store, which the environment describes."""
    return _store().load(state, **options)


def wait(timeout: float | None = None) -> None:
    """`CheckpointStore.wait` of the process's store."""
    _store().wait(timeout)

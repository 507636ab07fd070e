"""Save, from end to end: state -> slices -> plan -> snapshot -> agent."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from backends import open_backend
from backends.base import Backend
from backends.errors import BackendError, NoSpace

from ..agent import commit as committing
from ..agent import wire
from ..agent.submission import key_to_json
from ..agree import from_first, together
from ..config import Settings
from ..errors import (
    CheckpointError,
    ConfigError,
    OutcomeUnknown,
    SaveFailed,
    StepExists,
    StorageFull,
    StructureChanged,
    Superseded,
    UnsupportedValue,
    WaitTimeout,
)
from ..format.commit import Aborted, Commit
from ..format.keys import Attempt
from ..group import Group
from ..loop import Loop
from ..repo import runs
from ..state import Captured, capture, no_garbage_collection
from .client import AgentClient, Pending
from .digest import tensor_digest
from .handle import SaveHandle
from .planner import Planner, SavePlan
from .snapshot import Buffer, Pool, room_for

T = TypeVar("T")
log = logging.getLogger("ckptstore")

_ALIKE = {"chunk_size", "check_replicas", "buffers", "on_error"}  # settings that all ranks must have alike
_MARKS = 8  # saves after which no rank can still wait for one
_VALUES_LIMIT = 512 << 20  # bytes of plain values on one rank


@dataclass(frozen=True, slots=True)
class Request:
    """One call of save, as given."""

    step: int
    state: Mapping[str, object]
    metrics: Mapping[str, Any] | None = None
    overwrite: bool = False
    pin: bool = False
    per_rank: Sequence[str] = ()
    rank0: Sequence[str] = ()


class Saver:
    """Phase one of this rank's saves, and the line to the agent, which does phase two."""

    def __init__(self, url: str, backend: Backend, settings: Settings, group: Group, loop: Loop) -> None:
        self.url, self.backend, self.settings, self.group, self.loop = url, backend, settings, group, loop
        self.loaded: int | None = runs.NOT_LOADED  #: the step that the state came from
        self.handles: list[SaveHandle] = []  #: of saves whose end nobody has been told
        self._pool = Pool(settings.buffers, settings.host_memory)
        self._client = AgentClient(url, settings, self._pool.give_back, self._settle)
        self._planner: Planner | None = None
        self._run: runs.Started | None = None
        self._ordinal = 0
        self._replanned = 0  #: the ordinal of the last save that planned anew because of one before
        self._recent: dict[int, SaveHandle] = {}  #: by ordinal
        self._by_step: dict[int, SaveHandle] = {}

    def save(self, request: Request) -> SaveHandle:
        """See CheckpointStore.save."""
        with no_garbage_collection():  # which would be part of the stall, and finds nothing among what is made here
            return self._save(request)

    def _save(self, request: Request) -> SaveHandle:
        handle = SaveHandle(request.step, time.perf_counter())
        self._report_failures()
        first = self._begin(request) if self._run is None else None
        assert self._run is not None
        run, attempt = self._run, self._next_attempt(request)
        handle.run, handle.ordinal = attempt.run, attempt.ordinal
        self._by_step[request.step] = handle
        self._recent = {n: h for n, h in self._recent.items() if n >= attempt.ordinal - self.settings.buffers}
        self._recent[attempt.ordinal] = handle
        try:
            self._check_superseded()
            captured, plan = first or self._planned(request, attempt)
            self._client.introduce(run, plan.rank_plan)
            buffer = self._pool.take(room_for(plan, captured), self.settings.timeout, self._uploading)
            message = self._copy(request, attempt, captured, plan, buffer)
        except BaseException as error:  # other ranks' part of this save must not wait for ours
            self.group.pass_by(_mark(attempt))
            failure = error if isinstance(error, CheckpointError) else SaveFailed(f"{type(error).__name__}: {error}")
            self._client.refuse(attempt, self.group.rank, failure)
            handle.finish(failure)
            raise
        self.handles.append(handle)
        self._client.submit(Pending(run, plan.rank_plan, message, buffer, handle))
        handle.left(plan.size)
        self._pool.warm(room_for(plan, captured))
        return handle

    def _copy(
        self, request: Request, attempt: Attempt, captured: Captured, plan: SavePlan, buffer: Buffer
    ) -> dict[str, Any]:
        """Phase one itself; what the agent is told about it."""
        try:
            metrics = None if request.metrics is None else _json_able(request.metrics)
            buffer.arrange(plan, captured)
            buffer.fill(captured)
            values = buffer.put_values(plan, captured)
            return {
                "type": "submit",
                "plan": plan.rank_plan.fingerprint,
                "attempt": attempt.to_json(),
                "values": [[v.name, v.rank, v.offset, v.length, v.owned, v.witness, v.across] for v in values],
                "digests": self._seldom_digests(plan, captured),
                "metrics": metrics,
                "pin": request.pin,
            }
        except BaseException:
            self._pool.give_back(buffer)
            raise

    def prepare(self, request: Request) -> None:
        """See CheckpointStore.prepare."""
        captured = self._capture_together(request, "prepare")
        plan = self._make_plan(captured)
        self._pool.warm(room_for(plan, captured))

    def restart(self, loaded: int | None) -> None:
        """The next save starts a new run, which goes on from step `loaded`."""
        self.loaded, self._run, self._replanned = loaded, None, 0
        self._by_step.clear()
        self._recent.clear()

    def start_run(self, step: int | None, overwrite: bool) -> runs.Started:
        """Rank 0 registers the run; all ranks learn of it, or raise what it raised. Collective."""
        mine = json.dumps([step, self.loaded, overwrite])
        for rank, other in enumerate(self.group.gather(mine.encode())):
            if other.decode() != mine:
                ours = f"[step, step loaded, overwrite] is {mine} on rank {self.group.rank}"
                raise ConfigError(f"ranks differ in what they save: {ours}, {other.decode()} on rank {rank}")
        return runs.Started.from_json(json.loads(from_first(self.group, lambda: self._register(step, overwrite))))

    def _register(self, step: int | None, overwrite: bool) -> bytes:
        try:
            run = self.loop.run(runs.start(self.backend, step, self.loaded, overwrite))
        except NoSpace as error:
            raise StorageFull(f"{error}; free space there, the next save will try again") from error
        except BackendError as error:
            raise ConfigError(f"{self.url} cannot be used: {error}") from error
        return json.dumps(run.to_json()).encode()

    def leave(self) -> None:
        self._client.say_goodbye()

    def close(self) -> None:
        self._client.close()
        self._pool.close()

    def _begin(self, request: Request) -> tuple[Captured, SavePlan]:
        """At a run's first save: agree on the plan and start the run. Collective."""
        captured = self._capture_together(request, "save for the first time")
        plan = None if self._planner is None else self._planner.current
        if self.group.any(self._planner is None or not self._planner.fits(captured)) or plan is None:
            plan = self._make_plan(captured)
        self._run, self._ordinal = self.start_run(request.step, request.overwrite), 0
        return captured, plan

    def _planned(self, request: Request, attempt: Attempt) -> tuple[Captured, SavePlan]:
        """The state's slices and the plan for them. Collective if the structure has changed.

        :raises StructureChanged: it has on this rank, not on all. Once all ranks know, they plan anew.
        """
        captured, planner = self._capture(request), self._planner
        assert planner is not None
        if self._all_plan_anew(attempt):
            self._replanned = attempt.ordinal
            self.group.meet(f"plan save {attempt.ordinal} anew")
            return captured, self._make_plan(captured)
        mark = _mark(attempt)
        if planner.current is not None and planner.fits(captured):
            self.group.pass_by(mark, _mark(replace(attempt, ordinal=attempt.ordinal - _MARKS)))
            return captured, planner.current
        try:
            self.group.meet(f"plan save {attempt.ordinal} anew", unless=lambda: self.group.passed(mark))
        except WaitTimeout as error:
            if not self.group.passed(mark):
                raise
            raise StructureChanged(
                f"step {attempt.step}: the state got another structure on rank {self.group.rank} and not on others, so "
                f"this save is given up; the {self.settings.buffers}. save after this one plans anew on all ranks"
            ) from error
        return captured, self._make_plan(captured)

    def _all_plan_anew(self, attempt: Attempt) -> bool:
        """Whether some rank's structure had changed, in the latest save whose end all ranks know by now."""
        handle = self._recent.get(attempt.ordinal - self.settings.buffers)
        if handle is None or handle.ordinal <= self._replanned:
            return False
        return isinstance(handle.peek(self.settings.timeout), StructureChanged)

    def _next_attempt(self, request: Request) -> Attempt:
        """Counted locally, and so that all ranks come to the same: before anything that only one of them may fail in.

        :raises StepExists: the step is stored, or about to be.
        """
        assert self._run is not None
        steps, before = self._run.steps, self._by_step.get(request.step)
        stored = request.step in steps
        if before is not None:  # how it ended is the same on all ranks
            stored = before.peek(self.settings.timeout) is None
        if stored and not request.overwrite:
            raise StepExists(f"step {request.step} is in {self.url} already; overwrite=True replaces it")
        steps[request.step] = steps.get(request.step, -1) + 1
        self._ordinal += 1
        return Attempt(self._run.run.number, self._ordinal, request.step, steps[request.step])

    def _capture_together(self, request: Request, purpose: str) -> Captured:
        """The state's slices, and an agent; what any rank raises on the way, all raise. Collective."""
        self.group.meet(purpose)
        together(self.group, self._client.ensure)
        return together(self.group, lambda: self._capture(request))

    def _capture(self, request: Request) -> Captured:
        captured = capture(request.state, rank=self.group.rank, per_rank=request.per_rank, rank0=request.rank0)
        size = sum(len(value.data) for value in captured.values)
        if size > _VALUES_LIMIT:
            largest = max(captured.values, key=lambda value: len(value.data))
            raise UnsupportedValue(
                f"plain values of {size} bytes are too much ({_VALUES_LIMIT}); {largest.name!r} alone has "
                f"{len(largest.data)}: give it as a tensor or numpy array"
            )
        return captured

    def _make_plan(self, captured: Captured) -> SavePlan:
        if self._planner is None:
            runtime_dir = self.settings.runtime_dir.absolute()
            wire.meeting(runtime_dir, self.url)
            node = wire.node_identity(runtime_dir)
            self._planner = Planner(self.group, node, {"url": self.url, **self.settings.model_dump(include=_ALIKE)})
        return self._planner.make(captured)

    def _seldom_digests(self, plan: SavePlan, captured: Captured) -> list[Any]:
        """Digests of the larger replicas, in every CHECK_REPLICAS-th save; the plan has compared them in the first."""
        if not plan.seldom or self._ordinal % self.settings.check_replicas:
            return []
        tensors = {tensor.key: tensor.tensor for tensor in captured.tensors}
        return [
            [key_to_json(key), tensor_digest(tensors[key]).ljust(32, b"\0").hex(), across]
            for key, across in plan.seldom
        ]

    def _settle(self, attempt: Attempt, error: CheckpointError) -> CheckpointError | None:
        """End a save that no agent will finish: aborted, unless another node's agent has committed it already."""
        content = Aborted(attempt, type(error).__name__, str(error))
        try:
            with closing(Loop()) as loop:  # the store may be closed by now
                found = loop.run(_with_backend(self.url, lambda backend: committing.fill(backend, content)))
        except (BackendError, CheckpointError) as unknown:
            outcome = OutcomeUnknown(f"{error}; and whether {attempt.slot} stands cannot be read: {unknown}")
            outcome.__cause__ = error
            return outcome
        return None if isinstance(found, Commit) else error

    def _report_failures(self) -> None:
        """Log what earlier saves ended with that nobody has been told; with ON_ERROR=raise, raise it.

        All ranks must raise it at the same save, so they do once the save's buffer is needed again: then all know. Nor
        can it matter there whether this rank's user has been told, who may be another than other ranks'.
        """
        alone = self.group.size == 1
        known = self._ordinal if alone else self._ordinal + 1 - self.settings.buffers
        for handle in list(self.handles):
            due = handle.ordinal <= known or not self._is_current(handle)
            if self.settings.on_error == "raise" and not due:
                break
            if not handle.done() and (self.settings.on_error == "warn" or alone):
                continue
            told, error = handle.observed, handle.peek(self.settings.timeout)
            if isinstance(error, Superseded) and self._is_current(handle):
                continue  # which every save of this run raises
            self.handles.remove(handle)
            if error is None and self._by_step.get(handle.step) is handle:
                del self._by_step[handle.step]  # stored, as run.steps says
            if error is not None and self.settings.on_error == "raise":
                if not (alone and told):
                    raise error
            elif error is not None and not told:
                log.warning("step %d was not saved: %s: %s", handle.step, type(error).__name__, error)

    def _check_superseded(self) -> None:
        for handle in self.handles:
            error = handle.peek(0) if handle.done() and self._is_current(handle) else None
            if isinstance(error, Superseded):
                handle.observed = True
                raise error

    def _is_current(self, handle: SaveHandle) -> bool:
        return self._run is not None and handle.run == self._run.run.number

    def _uploading(self) -> str:
        return f"the upload of steps {[handle.step for handle in self.handles if not handle.done()]}"


def _mark(attempt: Attempt) -> str:
    return f"{attempt.run}.{attempt.ordinal}"


def _json_able(metrics: Mapping[str, Any]) -> Any:
    try:
        return json.loads(json.dumps(dict(metrics), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"metrics {dict(metrics)!r} are not JSON-able: {error}") from error


async def _with_backend(url: str, work: Callable[[Backend], Awaitable[T]]) -> T:
    async with open_backend(url) as backend:
        return await work(backend)

"""Which checkpoint to load, and what is in it."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import Literal

from blake3 import blake3

from ..errors import CorruptCheckpoint
from ..format import part as parts
from ..format.commit import Commit, PartRef
from ..format.keys import Slot
from ..format.model import VALUE, SliceKey
from ..format.part import Part
from ..repo import lineage
from ..state.catalog import TensorInfo
from ..state.values import MAX_BYTES
from .plan import Saved
from .storage import Storage


class Candidates:
    """The checkpoints that a load may take, newest first. Rank 0 has one.

    :param step: the only step that will do, or "latest".
    """

    def __init__(self, storage: Storage, step: int | Literal["latest"]) -> None:
        self._storage, self._step = storage, step
        self._slots: Iterator[Slot] | None = None

    async def next(self, skipped: list[tuple[int, str]]) -> Commit | None:
        """The next one whose commit verifies, None after the last; `skipped` gets those before it that do not.

        :raises CorruptCheckpoint: the only step that will do does not verify; or a run's document does not, so that
            nobody knows which checkpoints there are.
        """
        backend = self._storage.backend
        if self._slots is None:
            async with self._storage.answered("the store's history"):
                visible = (await lineage.read(backend)).visible()
            self._slots = iter([slot for slot in visible if self._step in ("latest", slot.step)])
        for slot in self._slots:
            try:
                async with self._storage.answered(slot):
                    found = await lineage.read_slot(backend, slot)
            except CorruptCheckpoint as error:
                if self._step != "latest":
                    raise
                skipped.append((slot.step, str(error)))
                continue
            if isinstance(found, Commit):
                return found
        return None


async def read_parts(storage: Storage, commit: Commit) -> list[Part]:
    """All parts of the checkpoint, each proved to be the one the commit names.

    :raises CorruptCheckpoint: a part is gone or is not what was written; the message names it.
    """
    gate = asyncio.Semaphore(storage.concurrency)

    async def read(ref: PartRef) -> Part:
        async with gate:
            data = await storage.read(ref.key, ref.size)
            return await asyncio.to_thread(_verified, ref, data)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(read(ref)) for ref in commit.parts]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


def _verified(ref: PartRef, data: bytes) -> Part:
    if blake3(data).hexdigest() != ref.digest:
        raise CorruptCheckpoint(f"{ref.key}: is not the part that the commit names")
    return parts.decode(data, ref.key)


class Catalog:
    """What a checkpoint holds, by name and rank.

    :raises CorruptCheckpoint: slices of one name differ in element type or shape.
    """

    def __init__(self, commit: Commit, read: Iterable[Part]) -> None:
        self.world_size = commit.world_size
        slices: dict[tuple[str, int], list[tuple[SliceKey, list[parts.Extent]]]] = {}
        for key, extents in parts.by_slice(read):
            slices.setdefault((key.name, key.rank), []).append((key, extents))
        for found in slices.values():
            first = found[0][0]
            for key, _ in found:
                if (key.dtype, key.shape) != (first.dtype, first.shape):
                    both = f"{first.dtype} {first.shape} and {key.dtype} {key.shape}"
                    raise CorruptCheckpoint(f"{commit.slot}: {key.name!r} is stored as {both}")
        self.saved = {where: Saved(found) for where, found in slices.items()}
        self._names = sorted({name for name, _ in self.saved})

    def names(self, prefix: str) -> list[str]:
        """All names equal to `prefix` or below ``prefix + "/"``; all there are for an empty one."""
        if not prefix:
            return list(self._names)
        below = f"{prefix}/"
        start, stop = bisect_left(self._names, below), bisect_left(self._names, f"{prefix}0")  # "0" comes after "/"
        exact = bisect_left(self._names, prefix)
        return [*(name for name in self._names[exact : exact + 1] if name == prefix), *self._names[start:stop]]

    def tensor(self, name: str, rank: int) -> TensorInfo | None:
        saved = self.saved.get((name, rank))
        if saved is None or saved.key.dtype == VALUE:
            return None
        return TensorInfo(saved.key.dtype, saved.key.shape, numpy=False, sharded=not saved.whole)

    def has_value(self, name: str, rank: int) -> bool:
        saved = self.saved.get((name, rank))
        return saved is not None and saved.key.dtype == VALUE

    def value(self, name: str, rank: int) -> SliceKey:
        """The slice that is the encoding of this plain value.

        :raises CorruptCheckpoint: it is too large to be one.
        """
        key = self.saved[name, rank].key
        if key.nbytes > MAX_BYTES:
            raise CorruptCheckpoint(f"{name!r}: a plain value of {key.nbytes} bytes")
        return key

"""Read the plan's ranges, verify every chunk, hand its bytes on: a few readers, each with one buffer it uses again."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from blake3 import blake3

from backends.key import ObjectKey

from ..errors import CorruptCheckpoint
from .plan import Copy, Plan, Read
from .storage import Storage

MEMORY = 256 << 20  #: bytes in buffers at once, unless a single read is larger

Place = Callable[[memoryview, Sequence[Copy]], None]


async def fetch(storage: Storage, plan: Plan, place: Place) -> None:
    """Read everything in the plan, and call ``place(decoded chunk, its copies)`` for each chunk that verifies.

    `place` runs in threads, several at once; when this returns or raises, none runs any more.

    :raises CorruptCheckpoint: a pack is gone or truncated, or a chunk is not what was written; names pack and tensor.
    :raises WaitTimeout: a request was not answered in time.
    """
    if not plan.reads:
        return
    largest = max(read.stop - read.start for read in plan.reads)
    readers = max(1, min(storage.concurrency, len(plan.reads), MEMORY // max(largest, 1)))
    todo = deque(plan.reads)
    loop = asyncio.get_running_loop()

    async def reader() -> None:
        memory = memoryview(bytearray(largest))
        while todo:
            read = todo.popleft()
            buffer = memory[: read.stop - read.start]
            await storage.read_into(ObjectKey(read.pack), read.start, buffer)
            await loop.run_in_executor(threads, _deliver, plan, read, buffer, place)

    with ThreadPoolExecutor(
        readers, "ckptstore-load"
    ) as threads:  # its end waits for what runs, so that no place is late
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(readers):
                    group.create_task(reader())
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None


def _deliver(plan: Plan, read: Read, buffer: memoryview, place: Place) -> None:
    for chunk, copies in read.chunks:
        start = chunk.offset - read.start
        data = buffer[start : start + chunk.stored]  # the codec is "none", the only one there is: stored as it was
        if blake3(data).digest() != chunk.digest:
            name = plan.wants[copies[0].want].name
            raise CorruptCheckpoint(
                f"{chunk.pack}: the chunk of {chunk.stored} bytes at {chunk.offset}, which holds {name!r}, "
                f"is not what was written"
            )
        place(data, copies)

"""The backend as loading uses it: requests counted and bounded in time, and proven absence told from other failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from backends.base import Backend
from backends.errors import NotFound, Truncated
from backends.key import ObjectKey

from ..errors import CorruptCheckpoint, WaitTimeout


class Storage:
    """:ivar concurrency: requests in flight at once, at most. :ivar timeout: seconds until a request must be answered.

    Both reads raise CorruptCheckpoint if the object is not there or too short, since the commit says otherwise;
    WaitTimeout if there was no answer; and as it is whatever else the backend raises, which proves nothing.
    """

    def __init__(self, backend: Backend, concurrency: int, timeout: float) -> None:
        self.backend, self.concurrency, self.timeout = backend, max(concurrency, 1), timeout
        self.requests = self.bytes_read = 0

    async def read(self, key: ObjectKey, length: int) -> bytes:
        """The object's first `length` bytes."""
        async with self._reading(key, length):
            return bytes(await self.backend.get_range(key, 0, length))

    async def read_into(self, key: ObjectKey, start: int, buffer: memoryview) -> None:
        """Fill the buffer with the object's bytes from `start` on."""
        async with self._reading(key, len(buffer)):
            await self.backend.get_range_into(key, start, buffer)

    @asynccontextmanager
    async def answered(self, what: object) -> AsyncIterator[None]:
        """:raises WaitTimeout: the block took too long."""
        deadline = asyncio.timeout(self.timeout)
        try:
            async with deadline:
                yield
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise WaitTimeout(f"{what}: storage did not answer within {self.timeout:g} s") from error

    @asynccontextmanager
    async def _reading(self, key: ObjectKey, length: int) -> AsyncIterator[None]:
        self.requests += 1
        try:
            async with self.answered(key):
                yield
        except NotFound as error:
            raise CorruptCheckpoint(f"{key}: the checkpoint needs it, and it is gone") from error
        except Truncated as error:
            raise CorruptCheckpoint(f"{key}: is shorter than what was written: {error.message}") from error
        self.bytes_read += length

"""A backend that fails on command: the wrapper through which tests see what callers make of faults."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from backends.base import WHOLE_LIMIT, Backend, ObjectInfo, flat

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Callable

    from typing_extensions import Buffer

    from backends.errors import BackendError
    from backends.key import ObjectKey

OPERATIONS = ("get", "get_range", "get_range_into", "put", "put_if_absent", "list", "stat", "delete")


@dataclass
class Fault:
    """What goes wrong in one call; `fired` tells whether it came to that. A test should insist that it did."""

    operation: str
    call: int
    error: type[BackendError] | BaseException | None = None
    after: bool = False
    delay: float = 0.0
    damage: Callable[[bytes], bytes] | None = None
    fired: bool = False

    async def strike(self, key: ObjectKey | None) -> None:
        """Wait, then fail if the fault is an error."""
        self.fired = True
        if self.delay:
            await asyncio.sleep(self.delay)
        if isinstance(self.error, BaseException):
            raise self.error
        if self.error is not None:
            raise self.error(key, f"injected into call {self.call} of {self.operation}")


class FaultyBackend(Backend):
    """Passes everything on to `inner`, counts it, and lets the injected faults strike.

    `counts` holds the calls of each operation, ``calls`` (their sum), ``bytes_read`` and ``bytes_written``.
    """

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.capabilities = inner.capabilities
        self.counts: Counter[str] = Counter()
        self.faults: list[Fault] = []

    def inject(
        self,
        operation: str,
        *,
        call: int = 1,
        error: type[BackendError] | BaseException | None = None,
        after: bool = False,
        delay: float = 0.0,
        damage: Callable[[bytes], bytes] | None = None,
    ) -> Fault:
        """Have the `call`-th call from now on (1 is the next) of an operation, or of any for ``*``, go wrong.

        It waits `delay` seconds and raises `error`, before its effect or `after` it (a lost answer); what a read
        brings goes through `damage` (see `flip` and `truncate`).
        """
        if operation != "*" and operation not in OPERATIONS:
            raise ValueError(f"{operation!r} is no operation; use * or one of {', '.join(OPERATIONS)}")
        seen = self.counts["calls" if operation == "*" else operation]
        fault = Fault(operation, seen + call, error, after, delay, damage)
        self.faults.append(fault)
        return fault

    async def get(self, key: ObjectKey, *, limit: int = WHOLE_LIMIT) -> bytes:
        due = await self._before("get", key)
        data = self._damaged(due, await self.inner.get(key, limit=limit))
        await self._after(due, key)
        return data

    async def get_range(self, key: ObjectKey, start: int, length: int) -> memoryview | bytes:
        due = await self._before("get_range", key)
        data = self._damaged(due, await self.inner.get_range(key, start, length))
        await self._after(due, key)
        return data

    async def get_range_into(self, key: ObjectKey, start: int, buffer: memoryview) -> None:
        due = await self._before("get_range_into", key)
        target = flat(buffer)
        await self.inner.get_range_into(key, start, target)
        data = self._damaged(due, bytes(target))
        target[: len(data)] = data
        target[len(data) :] = bytes(len(target) - len(data))
        await self._after(due, key)

    async def put(self, key: ObjectKey, parts: AsyncIterable[Buffer]) -> int:
        due = await self._before("put", key)
        size = await self.inner.put(key, parts)
        self.counts["bytes_written"] += size
        await self._after(due, key)
        return size

    async def put_if_absent(self, key: ObjectKey, data: bytes) -> None:
        due = await self._before("put_if_absent", key)
        await self.inner.put_if_absent(key, data)
        self.counts["bytes_written"] += len(data)
        await self._after(due, key)

    async def list(self, prefix: ObjectKey | None = None) -> AsyncIterator[ObjectInfo]:
        due = await self._before("list", prefix)
        async for info in self.inner.list(prefix):
            yield info
        await self._after(due, prefix)

    async def stat(self, key: ObjectKey) -> ObjectInfo:
        due = await self._before("stat", key)
        info = await self.inner.stat(key)
        await self._after(due, key)
        return info

    async def delete(self, key: ObjectKey) -> None:
        due = await self._before("delete", key)
        await self.inner.delete(key)
        await self._after(due, key)

    async def close(self) -> None:
        await self.inner.close()

    async def _before(self, operation: str, key: ObjectKey | None) -> tuple[Fault, ...]:
        """Count the call, and return the faults due in it after those before its effect have struck."""
        self.counts[operation] += 1
        self.counts["calls"] += 1
        calls = {operation: self.counts[operation], "*": self.counts["calls"]}
        due = tuple(fault for fault in self.faults if calls.get(fault.operation) == fault.call)
        for fault in due:
            if not fault.after and fault.damage is None:
                await fault.strike(key)
        return due

    async def _after(self, due: tuple[Fault, ...], key: ObjectKey | None) -> None:
        for fault in due:
            if fault.after:
                await fault.strike(key)

    def _damaged(self, due: tuple[Fault, ...], data: memoryview | bytes) -> bytes:
        data = bytes(data)
        self.counts["bytes_read"] += len(data)
        for fault in due:
            if fault.damage is not None:
                fault.fired = True
                data = fault.damage(data)
        return data


def flip(byte: int = 0) -> Callable[[bytes], bytes]:
    """Damage that inverts one byte."""

    def damage(data: bytes) -> bytes:
        return data[:byte] + bytes([data[byte] ^ 0xFF]) + data[byte + 1 :]

    return damage


def truncate(size: int) -> Callable[[bytes], bytes]:
    """Damage that loses all but the first `size` bytes; from a buffer to fill, they come as zeros."""

    def damage(data: bytes) -> bytes:
        return data[:size]

    return damage

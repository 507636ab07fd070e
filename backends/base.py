"""The promise that every place objects can live in keeps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator
    from types import TracebackType
    from typing import Self

    from typing_extensions import Buffer

    from .key import ObjectKey

WHOLE_LIMIT = 64 << 20  #: bytes that `get` reads at most unless told otherwise


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object as the store lists it."""

    key: ObjectKey
    size: int  #: bytes
    modified: float  #: seconds since the epoch, by the store's clock


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What the store can promise."""

    conditional_put: bool  #: whether put_if_absent is atomic among all writers
    durability: Literal["fsync", "replicated", "upload", "process"]  #: what a completed write survives


class Backend(ABC):
    """A flat set of immutable objects. All methods may be called from several tasks at once.

    Objects appear whole and durable or not at all, and are never replaced. Besides what each method lists, every method
    raises Transient (unreachable, overloaded: try again) and Permanent (forbidden, misconfigured), and a cancelled call
    ends only when nothing touches its buffers any more.
    """

    capabilities: Capabilities
    url: str = "(a backend without URL)"  #: canonical, for messages; set by open_backend

    @abstractmethod
    async def get(self, key: ObjectKey, *, limit: int = WHOLE_LIMIT) -> bytes:
        """The whole object.

        :raises NotFound: there is no such object.
        :raises Permanent: it has more than `limit` bytes; nothing was allocated.
        """

    @abstractmethod
    async def get_range(self, key: ObjectKey, start: int, length: int) -> memoryview | bytes:
        """Exactly `length` bytes from byte `start` on.

        :raises NotFound: there is no such object.
        :raises Truncated: the object ends before start + length.
        :raises ValueError: start or length is negative.
        """

    async def get_range_into(self, key: ObjectKey, start: int, buffer: memoryview) -> None:
        """Fill the writable, contiguous buffer from byte `start` on. After an error its content is undefined.

        :raises NotFound: there is no such object.
        :raises Truncated: the object ends before the buffer is full.
        :raises ValueError: start is negative.
        """
        target = flat(buffer)
        target[:] = await self.get_range(key, start, len(target))

    @abstractmethod
    async def put(self, key: ObjectKey, parts: AsyncIterable[Buffer]) -> int:
        """Store the parts end to end and return their bytes; a part is not touched once the next one is asked for.

        On an error, the stream's own included, or a cancellation nothing of it is left. A cancellation while the store
        is completing the object may come too late: then the object stands, whole.

        :raises AlreadyExists: the object stands, durable; it is not replaced.
        :raises NoSpace: the store is full.
        :raises OutcomeUnknown: the store failed while completing the object; it may stand.
        """

    @abstractmethod
    async def put_if_absent(self, key: ObjectKey, data: bytes) -> None:
        """Store the object; of racing writers exactly one succeeds.

        :raises AlreadyExists: another writer was first; its object is whole and durable.
        :raises NoSpace: the store is full.
        :raises OutcomeUnknown: the object may stand: read it back.
        """

    @abstractmethod
    def list(self, prefix: ObjectKey | None = None) -> AsyncIterator[ObjectInfo]:
        """All objects in the folder `prefix`, at any depth, sorted by key; None for all. A missing folder is empty.

        Objects that come or go meanwhile may or may not be shown; all others are.
        """

    @abstractmethod
    async def stat(self, key: ObjectKey) -> ObjectInfo:
        """Size and time of the object.

        :raises NotFound: there is no such object.
        """

    @abstractmethod
    async def delete(self, key: ObjectKey) -> None:
        """Remove the object, durably.

        :raises NotFound: there is no such object.
        :raises OutcomeUnknown: the object may or may not be gone.
        """

    async def close(self) -> None:  # noqa: B027 - most backends hold nothing
        """Let go of threads and connections, waiting for calls in flight. May be called twice."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def flat(part: Buffer) -> memoryview:
    """The bytes of a C-contiguous buffer of any type and shape.

    :raises TypeError: the buffer is not C-contiguous.
    """
    view = memoryview(part)
    return view.cast("B") if view.nbytes else memoryview(bytearray())  # cast refuses shapes that hold a zero


def check_range(start: int, length: int) -> None:
    """:raises ValueError: start or length is negative."""
    if start < 0 or length < 0:
        raise ValueError(f"a range cannot start at {start} and have {length} bytes")

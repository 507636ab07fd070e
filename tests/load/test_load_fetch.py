"""Fetching verifies what it reads, within bounds of memory and requests; placing reaches tensors of every kind."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Sequence

import pytest
import torch

from backends.errors import Permanent
from backends.key import ObjectKey
from backends.memory import MemoryBackend
from ckptstore.errors import CorruptCheckpoint, WaitTimeout
from ckptstore.format.model import ITEMSIZE, Box, SliceKey, whole
from ckptstore.format.part import Extent
from ckptstore.loading import fetch as fetching
from ckptstore.loading.fetch import fetch
from ckptstore.loading.place import Placer
from ckptstore.loading.plan import Copy, Plan, Saved, plan
from ckptstore.loading.storage import Storage
from tests.load import stores

PACK = "packs/000001/000001/00000-a-0000.pack"


def stored(pieces: Sequence[stores.Piece], backend: MemoryBackend, size: int = 64) -> dict[tuple[str, int], Saved]:
    blob, extents = stores.pack(pieces, PACK, size)
    asyncio.run(backend.put(ObjectKey(PACK), stores.stream(blob)))
    found: dict[tuple[str, int], dict[SliceKey, list[Extent]]] = {}
    for extent in extents:
        found.setdefault((extent.key.name, extent.key.rank), {}).setdefault(extent.key, []).append(extent)
    return {where: Saved(list(slices.items())) for where, slices in found.items()}


@pytest.fixture
def backend() -> MemoryBackend:
    return MemoryBackend(uuid.uuid4().hex)


def random(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Random bits, NaNs of every kind among them; as many as the element type has."""
    size = ITEMSIZE[str(dtype).removeprefix("torch.")]
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (*shape, size), dtype=torch.uint8)
    return bits.view(dtype).reshape(shape)


def zeros(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return (
        torch.zeros((*shape, ITEMSIZE[str(dtype).removeprefix("torch.")]), dtype=torch.uint8).view(dtype).reshape(shape)
    )


def load(
    backend: MemoryBackend, saved: dict[tuple[str, int], Saved], targets: list[tuple[SliceKey, torch.Tensor]]
) -> None:
    todo = plan([key for key, _ in targets], saved)
    asyncio.run(fetch(Storage(backend, 4, 10), todo, Placer(todo.wants, [tensor for _, tensor in targets])))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", sorted(ITEMSIZE))
def test_every_element_type_arrives_bit_for_bit(name: str, backend: MemoryBackend) -> None:
    dtype = getattr(torch, name)
    tensors = {
        "a": random(dtype, (5, 7)),
        "b": random(dtype, ()),
        "c": random(dtype, (0, 3)),
        "d": random(dtype, (3, 4, 5)),
    }
    odd = stores.piece("odd", random(torch.uint8, (3,)))  # so that the rest starts where no element may
    saved = stored([odd, *(stores.piece(name, tensor) for name, tensor in tensors.items())], backend)
    targets = {name: zeros(dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    wide = zeros(dtype, (7, 10))
    keys = {name: stores.piece(name, tensor).key for name, tensor in tensors.items()}
    load(backend, saved, [(keys["a"], wide.t()[::2]), *((keys[name], targets[name]) for name in tensors)])
    for name, tensor in tensors.items():
        assert stores.raw(targets[name]) == stores.raw(tensor), name
    assert stores.raw(wide.t()[::2].contiguous()) == stores.raw(tensors["a"])
    assert not any(stores.raw(wide.t()[1::2].contiguous()))


def test_a_cast_a_leaf_with_gradient_and_a_view_are_reached(backend: MemoryBackend) -> None:
    tensor = torch.randn(6, 9, dtype=torch.float64)
    saved = stored([stores.piece("w", tensor)], backend)
    leaf = torch.nn.Parameter(torch.zeros(2, 9, dtype=torch.bfloat16))
    column = torch.zeros(6, 9)
    load(
        backend,
        saved,
        [
            (SliceKey("w", -1, "float64", (6, 9), Box((3, 0), (2, 9))), leaf),
            (SliceKey("w", -1, "float64", (6, 9), Box((1, 2), (4, 3))), column[1:5, 2:5]),
        ],
    )
    assert torch.equal(leaf, tensor[3:5].to(torch.bfloat16)) and leaf.requires_grad and leaf._version > 0
    assert torch.equal(column[1:5, 2:5], tensor[1:5, 2:5].float()) and column.count_nonzero() == 12


def test_memory_and_requests_in_flight_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.arange(1 << 20, dtype=torch.uint8)

    class Watched(MemoryBackend):
        now = most = 0

        async def get_range_into(self, key: ObjectKey, start: int, buffer: memoryview) -> None:
            self.now += 1
            self.most = max(self.most, self.now)
            await asyncio.sleep(0.001)
            await super().get_range_into(key, start, buffer)
            self.now -= 1

    for memory, most in ((1 << 30, 5), (100_000, 1), (300_000, 3), (1, 1)):
        monkeypatch.setattr(fetching, "MEMORY", memory)
        monkeypatch.setattr("ckptstore.loading.plan.MAX_READ", 100_000)
        watched = Watched(uuid.uuid4().hex)
        saved = stored([stores.piece("w", tensor)], watched, 50_000)
        target = torch.zeros_like(tensor)
        todo = plan([stores.piece("w", tensor).key], saved)
        storage = Storage(watched, 5, 10)
        asyncio.run(fetch(storage, todo, Placer(todo.wants, [target])))
        assert torch.equal(target, tensor) and watched.most == most
        assert (storage.requests, storage.bytes_read) == (11, 1 << 20)


@pytest.mark.parametrize("at", [4, 4 + 64, -1])
def test_a_flipped_bit_is_named(at: int, backend: MemoryBackend) -> None:
    saved = stored([stores.piece("model/w", torch.arange(50))], backend)
    asyncio.run(stores.replace(backend, ObjectKey(PACK), lambda data: stores.flip(data, at)))
    with pytest.raises(CorruptCheckpoint, match=rf"{PACK}.*'model/w'"):
        load(
            backend,
            saved,
            [(SliceKey("model/w", -1, "int64", (50,), whole((50,))), torch.zeros(50, dtype=torch.int64))],
        )


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: b"", lambda data: None])
def test_a_truncated_or_missing_pack_is_corruption(change: object, backend: MemoryBackend) -> None:
    saved = stored([stores.piece("w", torch.arange(50))], backend)
    asyncio.run(stores.replace(backend, ObjectKey(PACK), change))
    with pytest.raises(CorruptCheckpoint, match=PACK):
        load(backend, saved, [(SliceKey("w", -1, "int64", (50,), whole((50,))), torch.zeros(50, dtype=torch.int64))])


def test_a_refusal_or_silence_is_not_corruption() -> None:
    class Failing(MemoryBackend):
        async def get_range_into(self, key: ObjectKey, start: int, buffer: memoryview) -> None:
            raise Permanent(key, "403")

    class Silent(MemoryBackend):
        async def get_range_into(self, key: ObjectKey, start: int, buffer: memoryview) -> None:
            await asyncio.sleep(100)

    for kind, error in ((Failing, Permanent), (Silent, WaitTimeout)):
        backend = kind(uuid.uuid4().hex)
        todo = plan([stores.piece("w", torch.arange(50)).key], stored([stores.piece("w", torch.arange(50))], backend))
        with pytest.raises(error, match=PACK):
            asyncio.run(fetch(Storage(backend, 2, 0.05), todo, lambda data, copies: None))


def test_nothing_is_placed_after_a_failure_was_raised(monkeypatch: pytest.MonkeyPatch, backend: MemoryBackend) -> None:
    """One chunk is corrupt while another is being placed, slowly: the error waits until that has ended."""
    monkeypatch.setattr("ckptstore.loading.plan.MAX_READ", 1)
    saved = stored([stores.piece("w", torch.arange(64, dtype=torch.uint8))], backend, 16)
    asyncio.run(stores.replace(backend, ObjectKey(PACK), lambda data: stores.flip(data, 4 + 40)))
    running, placed = threading.Event(), []

    def slow(data: memoryview, copies: Sequence[Copy]) -> None:
        running.set()
        threading.Event().wait(0.2)
        placed.append(bytes(data))

    todo: Plan = plan([stores.piece("w", torch.arange(64, dtype=torch.uint8)).key], saved)
    with pytest.raises(CorruptCheckpoint):
        asyncio.run(fetch(Storage(backend, 4, 10), todo, slow))
    assert running.is_set()
    count = len(placed)
    assert count
    threading.Event().wait(0.3)
    assert len(placed) == count


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_tensors_on_a_device_are_reached(backend: MemoryBackend) -> None:
    tensor = torch.randn(64, 33)
    saved = stored([stores.piece("w", tensor)], backend, 1000)
    plain, strided, cast = torch.zeros(64, 33), torch.zeros(33, 64).t(), torch.zeros(64, 33, dtype=torch.bfloat16)
    targets = [target.to(torch.accelerator.current_accelerator()) for target in (plain, strided, cast)]
    load(backend, saved, [(stores.piece("w", tensor).key, target) for target in targets])
    torch.accelerator.synchronize()
    assert [torch.equal(t.cpu(), tensor.to(t.dtype)) for t in targets] == [True] * 3

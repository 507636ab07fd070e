"""Parts are untrusted: whatever happens to their bytes, `decode` gives a checked part or says CorruptCheckpoint."""

from __future__ import annotations

import contextlib
import json
import resource
import struct

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.errors import CorruptCheckpoint
from ckptstore.format import part as parts
from ckptstore.format.model import Box, SliceKey
from ckptstore.format.part import SCHEMA, Chunk, Extent, Part, Witness

PACK = "packs/000001/000001/00000-a-0000.pack"
KEY = SliceKey("model/w", -1, "float32", (4, 6), Box((1, 0), (2, 6)))
CHUNK = Chunk(bytes(range(32)), PACK, 7, 48, 48)
PART = Part(
    {"step": 3, "ranks": [0, 1]},
    [
        Extent(KEY, 0, 40, 8, CHUNK),
        Extent(KEY, 40, 8, 0, CHUNK),
        parts.empty(SliceKey("model/none", -1, "float32", (0, 3), Box((0, 0), (0, 3)))),
        Extent(SliceKey("epoch", 2, "value", (5,), Box((0,), (5,))), 0, 5, 0, CHUNK),
    ],
    [Witness(KEY, bytes(32))],
)
BYTES = parts.encode(PART)


def row(**changes: object) -> dict[str, object]:
    base: dict[str, object] = {
        "name": "w", "rank": -1, "dtype": "float32", "shape": [4], "offset": [0], "extent": [4], "start": 0,
        "length": 16, "skip": 0, "digest": bytes(32), "pack": PACK, "pack_offset": 0, "stored": 16, "size": 16,
        "codec": "none",
    }  # fmt: skip
    return base | changes


def table(
    rows: list[dict[str, object]], schema: pa.Schema = SCHEMA, options: pa.ipc.IpcWriteOptions | None = None
) -> bytes:
    schema = schema.with_metadata({"ckptstore": "{}"})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema, options=options) as writer:
        writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=schema))
    data: bytes = sink.getvalue().to_pybytes()
    return data


def test_what_is_encoded_is_decoded() -> None:
    assert parts.decode(BYTES, "part") == PART
    assert parts.decode(parts.encode(Part({}, [], [])), "part") == Part({}, [], [])
    assert parts.decode(table([row()]), "part").extents[0].chunk.pack == PACK


def test_every_truncation_is_refused() -> None:
    for length in range(len(BYTES)):
        with pytest.raises(CorruptCheckpoint, match="the-part"):
            parts.decode(BYTES[:length], "the-part")
    with pytest.raises(CorruptCheckpoint):
        parts.decode(BYTES + b"\0", "the-part")
    with pytest.raises(CorruptCheckpoint):
        parts.decode(BYTES + BYTES, "the-part")


def test_every_bit_flip_is_decoded_or_refused() -> None:
    """The commit's digest tells of flips; here only that nothing but CorruptCheckpoint comes out, and no crash."""
    for at in range(len(BYTES)):
        for bit in range(8):
            changed = bytearray(BYTES)
            changed[at] ^= 1 << bit
            with contextlib.suppress(CorruptCheckpoint):
                parts.decode(bytes(changed), "part")


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(BYTES) - 1), st.binary(min_size=1, max_size=8)), min_size=1, max_size=4))
def test_overwritten_bytes_are_decoded_or_refused(changes: list[tuple[int, bytes]]) -> None:
    changed = bytearray(BYTES)
    for at, data in changes:
        changed[at : at + len(data)] = data
    with contextlib.suppress(CorruptCheckpoint):
        parts.decode(bytes(changed), "part")


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    for framed in (data, BYTES[:8] + data, struct.pack("<iI", -1, len(data)) + data):
        with pytest.raises(CorruptCheckpoint):
            parts.decode(framed, "part")


int64 = st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(-2, 20))


@settings(max_examples=400, deadline=None)
@given(
    st.lists(int64, max_size=4), st.lists(int64, max_size=4), st.lists(int64, max_size=4),
    st.sampled_from(["float32", "value"]), int64, int64, int64, int64, int64, int64,
)  # fmt: skip
def test_what_is_decoded_makes_sense(
    shape: list[int], offset: list[int], extent: list[int], dtype: str,
    start: int, length: int, skip: int, pack_offset: int, stored: int, size: int,
) -> None:  # fmt: skip
    changed = row(shape=shape, offset=offset, extent=extent, dtype=dtype, start=start, length=length, skip=skip,
                  pack_offset=pack_offset, stored=stored, size=size)  # fmt: skip
    try:
        [found] = parts.decode(table([changed]), "part").extents
    except CorruptCheckpoint:
        return
    assert 0 <= found.start <= found.start + found.length <= found.key.nbytes
    assert 0 <= found.skip <= found.skip + found.length <= found.chunk.size == found.chunk.stored
    assert found.chunk.offset >= 0
    for whole, at, n in zip(found.key.shape, found.key.box.offset, found.key.box.shape, strict=True):
        assert 0 <= at <= at + n <= whole


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "object"},
        {"dtype": "value", "shape": [2, 2], "offset": [0, 0], "extent": [2, 2]},
        {"rank": -2},
        {"offset": [1]},
        {"offset": [-1]},
        {"extent": []},
        {"shape": [1 << 40, 1 << 40], "offset": [0, 0], "extent": [2, 2]},
        {"shape": [0, 1 << 62], "offset": [0, 0], "extent": [0, 0]},
        {"shape": [1] * 65, "offset": [0] * 65, "extent": [1] * 65},
        {"length": 17},
        {"start": 4},
        {"skip": 4},
        {"skip": -1},
        {"stored": 15},
        {"stored": -1, "size": -1},
        {"size": 1 << 40, "stored": 1 << 40},
        {"codec": "zip"},
        {"pack": "packs/../../etc/passwd"},
        {"pack": "/etc/passwd"},
        {"pack": "commits/000000000001.000001.000.json"},
        {"pack": ""},
        {"pack_offset": -1},
    ],
)
def test_impossible_rows_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(CorruptCheckpoint, match="the-part"):
        parts.decode(table([row(**changes)]), "the-part")


def test_compression_is_refused_before_anything_is_decompressed() -> None:
    rows = [row(name="n" * 1000)] * 10_000
    for codec in ("zstd", "lz4"):
        data = table(rows, options=pa.ipc.IpcWriteOptions(compression=codec))
        with pytest.raises(CorruptCheckpoint, match="compressed"):
            parts.decode(data, "part")


def test_dictionaries_other_schemas_and_missing_values_are_refused() -> None:
    coded = SCHEMA.set(0, pa.field("name", pa.dictionary(pa.int32(), pa.string()), nullable=False))
    with pytest.raises(CorruptCheckpoint):
        parts.decode(table([row()], coded), "part")
    with pytest.raises(CorruptCheckpoint, match="schema"):
        parts.decode(table([row()], SCHEMA.set(1, pa.field("rank", pa.int64(), nullable=False))), "part")
    nullable = pa.schema([field.with_nullable(True) for field in SCHEMA])
    with pytest.raises(CorruptCheckpoint):
        parts.decode(table([row(pack=None)], nullable), "part")
    inner = SCHEMA.set(3, pa.field("shape", pa.list_(pa.int64()), nullable=False))
    with pytest.raises(CorruptCheckpoint):
        parts.decode(table([row(shape=[None])], inner), "part")


def test_a_header_that_is_no_object_is_refused() -> None:
    for text in ("[]", "3", "", "{", json.dumps({"a": 1})[:-1], "[" * 100_000, "9" * 5000):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, SCHEMA.with_metadata({"ckptstore": text})) as writer:
            writer.write_batch(pa.RecordBatch.from_pylist([row()], schema=SCHEMA))
        with pytest.raises(CorruptCheckpoint, match="the-part"):
            parts.decode(sink.getvalue().to_pybytes(), "the-part")


def test_lengths_that_lie_allocate_nothing() -> None:
    """A few hundred bytes that claim gigabytes."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for at in range(0, len(BYTES) - 8, 4):
        for lie in (0x7FFFFFFF, 0x40000000):
            changed = bytearray(BYTES)
            changed[at : at + 4] = struct.pack("<I", lie)
            with contextlib.suppress(CorruptCheckpoint):
                parts.decode(bytes(changed), "part")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


def test_slices_are_gathered_over_parts_with_their_extents_in_order() -> None:
    first, second = Part({}, [PART.extents[1]], []), Part({}, [PART.extents[0]], [])
    assert list(parts.by_slice([first, second])) == [(KEY, [PART.extents[0], PART.extents[1]])]

"""A part: what one node wrote of a checkpoint, as an Arrow IPC stream of one record batch and a fixed schema.

A row says where a run of a slice's bytes lies: an *extent* of a slice (row-major bytes of its box) inside a chunk
(bytes of a pack with a digest of their own). A *witness* row instead gives the digest that this node found for the
whole of a slice that other nodes hold too; all witnesses of a slice must agree before the commit.

Parts are untrusted when read: the sizes are capped, compression and dictionaries refused before anything is decoded,
the batch fully validated, and every number checked against the others.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from backends.key import InvalidKey, ObjectKey

from ..errors import CorruptCheckpoint
from .model import ITEMSIZE, VALUE, Box, SliceKey

LIMIT = 256 << 20  #: bytes of the largest part
MAX_CHUNK = 1 << 30  #: bytes of the largest chunk, stored or decoded
CODECS = ("none",)
_MAX_DIMS = 64
_MAX_ELEMENTS = 1 << 60

SCHEMA = pa.schema(
    [
        pa.field("name", pa.string(), nullable=False),
        pa.field("rank", pa.int32(), nullable=False),
        pa.field("dtype", pa.string(), nullable=False),
        pa.field("shape", pa.list_(pa.field("item", pa.int64(), nullable=False)), nullable=False),
        pa.field("offset", pa.list_(pa.field("item", pa.int64(), nullable=False)), nullable=False),
        pa.field("extent", pa.list_(pa.field("item", pa.int64(), nullable=False)), nullable=False),
        pa.field("start", pa.int64(), nullable=False),
        pa.field("length", pa.int64(), nullable=False),
        pa.field("skip", pa.int64(), nullable=False),
        pa.field("digest", pa.binary(32), nullable=False),
        pa.field("pack", pa.string(), nullable=False),
        pa.field("pack_offset", pa.int64(), nullable=False),
        pa.field("stored", pa.int64(), nullable=False),
        pa.field("size", pa.int64(), nullable=False),
        pa.field("codec", pa.string(), nullable=False),
    ]
)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes of a pack: `stored` of them at `offset`, which decode to `size` bytes whose BLAKE3 is `digest`."""

    digest: bytes
    pack: str
    offset: int
    stored: int
    size: int
    codec: str = "none"


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes ``[start, start + length)`` of a slice; they begin `skip` bytes into the decoded chunk."""

    key: SliceKey
    start: int
    length: int
    skip: int
    chunk: Chunk


@dataclass(frozen=True, slots=True)
class Witness:
    """The digest one node found for a slice that it does not (or not alone) write."""

    key: SliceKey
    digest: bytes


@dataclass(frozen=True, slots=True)
class Part:
    header: dict[str, Any]  #: attempt, plan, node, ranks, packs, layouts, byte counts; JSON values
    extents: list[Extent]
    witnesses: list[Witness]


_NO_CHUNK = Chunk(bytes(32), "", 0, 0, 0, "none")
_WITNESS = "witness"
_REFUSALS = (pa.ArrowException, OSError, EOFError, ValueError, KeyError, TypeError, RecursionError, struct.error)
_END = b"\xff\xff\xff\xff\0\0\0\0"  # of an Arrow stream; its reader takes a stream without


def encode(part: Part) -> bytes:
    """The bytes of a part: schema, header (in the schema's metadata), one batch."""
    rows = [(e.key, e.start, e.length, e.skip, e.chunk) for e in part.extents]
    rows += [(w.key, 0, 0, 0, Chunk(w.digest, "", 0, 0, 0, _WITNESS)) for w in part.witnesses]
    columns: list[list[Any]] = [
        [key.name for key, *_ in rows],
        [key.rank for key, *_ in rows],
        [key.dtype for key, *_ in rows],
        [key.shape for key, *_ in rows],
        [key.box.offset for key, *_ in rows],
        [key.box.shape for key, *_ in rows],
        [start for _, start, *_ in rows],
        [length for _, _, length, *_ in rows],
        [skip for *_, skip, _ in rows],
        [chunk.digest for *_, chunk in rows],
        [chunk.pack for *_, chunk in rows],
        [chunk.offset for *_, chunk in rows],
        [chunk.stored for *_, chunk in rows],
        [chunk.size for *_, chunk in rows],
        [chunk.codec for *_, chunk in rows],
    ]
    schema = SCHEMA.with_metadata({"ckptstore": json.dumps(part.header, sort_keys=True, separators=(",", ":"))})
    arrays = [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(pa.record_batch(arrays, schema=schema))
    data: bytes = sink.getvalue().to_pybytes()
    return data


def decode(data: bytes, name: object) -> Part:
    """The part in `data`.

    :raises CorruptCheckpoint: anything about it is wrong; the message names the object and what is wrong.
    """
    if len(data) > LIMIT:
        raise CorruptCheckpoint(f"{name}: {len(data)} bytes are more than a part may have ({LIMIT})")
    try:
        header, batch = _read(data)
        columns = [batch.column(i).to_pylist() for i in range(batch.num_columns)]
        extents, witnesses = _split(zip(*columns, strict=True))
    except CorruptCheckpoint as error:
        raise CorruptCheckpoint(f"{name}: {error}") from error
    except _REFUSALS as error:
        raise CorruptCheckpoint(f"{name}: not a part: {error}") from error
    return Part(header, extents, witnesses)


def _read(data: bytes) -> tuple[dict[str, Any], pa.RecordBatch]:
    source = pa.BufferReader(data)
    kinds = []
    while True:  # look at the messages before any is decoded
        try:
            message = pa.ipc.read_message(source)
        except EOFError:
            break
        kinds.append(message.type)
        if len(kinds) > 2 or kinds != ["schema", "record batch"][: len(kinds)]:
            raise CorruptCheckpoint(f"holds {kinds} where one schema and one record batch were expected")
        if message.type == "record batch" and _compressed(message.metadata.to_pybytes()):
            raise CorruptCheckpoint("is compressed, which parts never are")
    if source.tell() != len(data) or len(kinds) != 2 or not data.endswith(_END):
        raise CorruptCheckpoint("is truncated, or has bytes after its end")
    with pa.ipc.open_stream(pa.BufferReader(data)) as stream:
        if not stream.schema.equals(SCHEMA):
            raise CorruptCheckpoint("has another schema than parts have")
        header = json.loads((stream.schema.metadata or {})[b"ckptstore"])
        batch = stream.read_next_batch()
    batch.validate(full=True)
    if any(column.null_count for column in batch.columns):
        raise CorruptCheckpoint("has missing values")
    if not isinstance(header, dict):
        raise CorruptCheckpoint("has no header")
    return header, batch


def _compressed(metadata: bytes) -> bool:
    """Whether a RecordBatch message (a flatbuffer, see Arrow's Message.fbs) has its `compression` field set."""

    def field(table: int, slot: int) -> int | None:
        vtable = table - struct.unpack_from("<i", metadata, table)[0]
        if 4 + 2 * slot >= struct.unpack_from("<H", metadata, vtable)[0]:
            return None
        at: int = struct.unpack_from("<H", metadata, vtable + 4 + 2 * slot)[0]
        return table + at if at else None

    root = struct.unpack_from("<I", metadata, 0)[0]
    header = field(root, 2)
    if header is None:
        raise CorruptCheckpoint("has a message without a header")
    return field(header + struct.unpack_from("<I", metadata, header)[0], 3) is not None


def _split(rows: Iterable[tuple[Any, ...]]) -> tuple[list[Extent], list[Witness]]:
    extents: list[Extent] = []
    witnesses: list[Witness] = []
    chunks: dict[tuple[Any, ...], Chunk] = {}
    for name, rank, dtype, shape, offset, extent, start, length, skip, *where in rows:
        key = SliceKey(name, rank, dtype, tuple(shape), Box(tuple(offset), tuple(extent)))
        check_key(key)
        if where[-1] == _WITNESS:
            witnesses.append(Witness(key, where[0]))
            continue
        chunk = chunks.get(tuple(where))
        if chunk is None:
            chunk = chunks[tuple(where)] = Chunk(*where)
            _check_chunk(chunk, name)
        if start < 0 or length < 0 or start + length > key.nbytes:
            raise CorruptCheckpoint(f"{name!r}: bytes [{start}, {start + length}) of a slice of {key.nbytes}")
        if skip < 0 or skip + length > chunk.size:
            raise CorruptCheckpoint(f"{name!r}: bytes [{skip}, {skip + length}) of a chunk of {chunk.size}")
        extents.append(Extent(key, start, length, skip, chunk))
    return extents, witnesses


def check_key(key: SliceKey) -> None:
    """:raises CorruptCheckpoint: the slice cannot be: its element type, a box outside its tensor, too many elements."""
    box = key.box
    if key.dtype not in ITEMSIZE and (key.dtype != VALUE or len(key.shape) != 1):
        raise CorruptCheckpoint(f"{key.name!r}: unknown element type {key.dtype!r}")
    if not len(key.shape) == len(box.offset) == len(box.shape) <= _MAX_DIMS:
        raise CorruptCheckpoint(f"{key.name!r}: shape {key.shape} and box {box} differ in dimensions")
    elements = 1
    for whole, start, size in zip(key.shape, box.offset, box.shape, strict=True):
        if whole < 0 or start < 0 or size < 0 or start + size > whole:
            raise CorruptCheckpoint(f"{key.name!r}: box {box} lies outside shape {key.shape}")
        elements *= max(whole, 1)
        if elements > _MAX_ELEMENTS:
            raise CorruptCheckpoint(f"{key.name!r}: shape {key.shape} has too many elements")
    if key.rank < -1:
        raise CorruptCheckpoint(f"{key.name!r}: rank {key.rank}")


def _check_chunk(chunk: Chunk, name: str) -> None:
    if chunk == _NO_CHUNK:  # what empty slices have
        return
    if chunk.codec not in CODECS:
        raise CorruptCheckpoint(f"{name!r}: unknown codec {chunk.codec!r}; a newer version may have written it")
    if not 0 <= chunk.size <= MAX_CHUNK or not 0 <= chunk.stored <= MAX_CHUNK or not 0 <= chunk.offset < 1 << 60:
        raise CorruptCheckpoint(f"{name!r}: impossible chunk {chunk}")
    if chunk.codec == "none" and chunk.stored != chunk.size:
        raise CorruptCheckpoint(f"{name!r}: an uncompressed chunk of {chunk.size} bytes stored as {chunk.stored}")
    try:
        pack = ObjectKey(chunk.pack)
    except InvalidKey as error:
        raise CorruptCheckpoint(f"{name!r}: {error}") from error
    if not str(pack).startswith("packs/"):
        raise CorruptCheckpoint(f"{name!r}: {chunk.pack!r} is not a pack")


def empty(key: SliceKey) -> Extent:
    """The row of a slice without elements: it has a name and a shape, and no bytes."""
    return Extent(key, 0, 0, 0, _NO_CHUNK)


def by_slice(parts: Iterable[Part]) -> Iterator[tuple[SliceKey, list[Extent]]]:
    """The slices of these parts, each with its extents in order of their start."""
    found: dict[SliceKey, list[Extent]] = {}
    for part in parts:
        for extent in part.extents:
            found.setdefault(extent.key, []).append(extent)
    for key, extents in found.items():
        yield key, sorted(extents, key=lambda extent: extent.start)

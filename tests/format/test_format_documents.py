"""Commits and the documents they are: canonical, self-verifying, and refused with CorruptCheckpoint alone."""

from __future__ import annotations

import json
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptstore.errors import CorruptCheckpoint
from ckptstore.format import commit as commits
from ckptstore.format import document, keys
from ckptstore.format import part as parts
from ckptstore.format.commit import Aborted, Commit, PartRef
from ckptstore.format.keys import Attempt, Slot
from ckptstore.format.model import Box, SliceKey
from ckptstore.format.part import Part, Witness

ATTEMPT = Attempt(run=2, ordinal=5, step=100, generation=1)
REF = PartRef(ATTEMPT.part(0), "ab" * 32, 1234, 0, (0, 1))
COMMIT = Commit(ATTEMPT, 2, (REF,), {"meshes": [], "tensors": {}}, 10, 5, {"loss": 0.5}, True)
BYTES = commits.encode(COMMIT)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def signed(body: Any) -> bytes:
    """A document whose digest is right, whatever is in it."""
    return document.canonical({"body": body, "digest": blake3(document.canonical(body)).hexdigest()})


def body() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(BYTES)["body"]
    return found


def test_what_is_encoded_is_decoded_and_the_same_bytes_again() -> None:
    for content in (COMMIT, Aborted(ATTEMPT, "SaveFailed", "because")):
        data = commits.encode(content)
        assert commits.decode(data, ATTEMPT.slot) == content
        assert commits.encode(commits.decode(data, ATTEMPT.slot)) == data


def test_every_truncation_and_bit_flip_is_refused() -> None:
    for length in range(len(BYTES)):
        with pytest.raises(CorruptCheckpoint, match=str(ATTEMPT.slot)):
            commits.decode(BYTES[:length], ATTEMPT.slot)
    for at in range(len(BYTES)):
        for bit in range(8):
            changed = bytearray(BYTES)
            changed[at] ^= 1 << bit
            with pytest.raises(CorruptCheckpoint):
                commits.decode(bytes(changed), ATTEMPT.slot)


def test_a_commit_in_another_slot_is_refused() -> None:
    with pytest.raises(CorruptCheckpoint, match="holds the commit of"):
        commits.decode(BYTES, Slot(100, 2, 0))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_field_of_any_other_kind_is_decoded_or_refused(data: st.DataObject) -> None:
    changed = body()
    where = data.draw(st.sampled_from(sorted(changed)))
    changed[where] = data.draw(json_values)
    if data.draw(st.booleans()):
        ref = changed["parts"][0] if isinstance(changed["parts"], list) and changed["parts"] else {}
        if isinstance(ref, dict) and ref:
            ref[data.draw(st.sampled_from(sorted(ref)))] = data.draw(json_values)
    try:
        found = commits.decode(signed(changed), ATTEMPT.slot)
    except CorruptCheckpoint:
        return
    assert commits.decode(commits.encode(found), ATTEMPT.slot) == found  # whatever passes can be written again
    if isinstance(found, Commit):
        assert found.world_size > 0
        assert all(type(n) is int for ref in found.parts for n in (ref.size, ref.node, *ref.ranks))
        assert found.attempt.part(0)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b'{"body":{},"digest":""}',
        b'{"body":{},"digest":{}}',
        b'{"body":[],"digest":""}',
        b'{"body":{"a":1,"a":1},"digest":""}',
        b'{"body":{"a":NaN},"digest":""}',
        b'{"body":{"a":1e999},"digest":""}',
        b'{"body":{"a":"\\ud800"},"digest":""}',
        b'{"body":{"a":' + b"9" * 10_000 + b'},"digest":""}',
        b'{"body":{"a":' + b"[" * 200_000 + b"]" * 200_000 + b'},"digest":""}',
        b'{"body":{"a":' + b"[" * 900 + b"]" * 900 + b'},"digest":""}',
        "{}".encode("utf-16"),
        b"\xff\xfe\xff",
    ],
    ids=range(15),
)
def test_documents_of_no_kind_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptCheckpoint, match="the-object"):
        document.decode(data, "the-object", "commit")


@settings(max_examples=200, deadline=None)
@given(json_values, st.binary(max_size=60))
def test_any_document_is_decoded_or_refused(value: Any, data: bytes) -> None:
    for made in (signed(value), data):
        with pytest.raises(CorruptCheckpoint):
            commits.decode(made, ATTEMPT.slot)


def test_other_versions_and_kinds_are_refused_by_name() -> None:
    with pytest.raises(CorruptCheckpoint, match="format version 2"):
        commits.decode(signed(body() | {"version": 2}), ATTEMPT.slot)
    with pytest.raises(CorruptCheckpoint, match="'run'"):
        commits.decode(signed(body() | {"kind": "run"}), ATTEMPT.slot)


def test_names_of_objects_parse_back_and_others_do_not() -> None:
    assert keys.parse_slot(ATTEMPT.slot.key) == ATTEMPT.slot
    assert keys.parse_run(keys.run_key(7)) == 7
    for name in (
        "1.2.3.json",
        "000000000100.000002.001.txt",
        "000000000100.000002.json",
        "x.y.z.json",
        "²²²²²²²²²²²².000002.001.json",
    ):
        assert keys.parse_slot(keys.COMMITS / name) is None
    for name in ("abc.json", "000001", "²²²²²².json", "1.json", "00000001.json"):
        assert keys.parse_run(keys.RUNS / name) is None
    big = Slot(10**13, 10**7, 2000)
    assert keys.parse_slot(big.key) == big


def part(node: int, **changes: Any) -> tuple[bytes, Part]:
    header = {"step": 100, "plan": "p", "generation": 1, "run_id": "r", "ranks": [node], "world_size": 2, "layouts": {},
              "bytes_state": 3, "bytes_written": 2, "metrics": None, "pin": False}  # fmt: skip
    witnesses = [Witness(SliceKey("w", -1, "float32", (1,), Box((0,), (1,))), changes.pop("digest", bytes(32)))]
    found = Part(header | changes, [], witnesses)
    return parts.encode(found), found


def test_parts_that_agree_make_a_commit_and_others_abort() -> None:
    content = commits.assemble(ATTEMPT, [part(0), part(1)])
    assert isinstance(content, Commit) and content.bytes_state == 6 and [ref.node for ref in content.parts] == [0, 1]
    differs = commits.assemble(ATTEMPT, [part(0), part(1, step=101)])
    assert isinstance(differs, Aborted) and "step: 100 and 101" in differs.reason
    replica = commits.assemble(ATTEMPT, [part(0), part(1, digest=b"1" * 32)])
    assert isinstance(replica, Aborted) and replica.error == "ReplicaMismatch" and "'w'" in replica.reason


def test_meshes_of_parts_are_merged() -> None:
    one = {"meshes": [{"shape": [2]}], "tensors": {"a": [0, ["S0"]]}}
    two = {"meshes": [{"shape": [4]}, {"shape": [2]}], "tensors": {"b": [0, ["R"]], "c": [1, ["S1"]]}}
    content = commits.assemble(ATTEMPT, [part(0, layouts=one), part(1, layouts=two)])
    assert isinstance(content, Commit)
    meshes, tensors = content.layouts["meshes"], content.layouts["tensors"]
    assert {name: meshes[mesh]["shape"] for name, (mesh, _) in tensors.items()} == {"a": [2], "b": [4], "c": [2]}

"""Keys: what can be named, what cannot, and that no key leads out of a store."""

from __future__ import annotations

import os.path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.key import MAX_BYTES, MAX_SEGMENT_BYTES, InvalidKey, ObjectKey

# No deadline on a busy machine, and nothing left in the working directory.
quietly = settings(deadline=None, database=None)

LETTERS = st.characters(exclude_categories=["Cc", "Cs"], exclude_characters="/\\")
SEGMENTS = st.text(LETTERS, min_size=1, max_size=40).filter(lambda s: s not in (".", "..") and not s.endswith(".tmp"))
PATHS = st.lists(SEGMENTS, min_size=1, max_size=5).map("/".join)


@quietly
@given(PATHS)
def test_legal_paths_are_kept_as_they_are(path: str) -> None:
    key = ObjectKey(path)
    assert str(key) == path
    assert ObjectKey.of(*key.segments) == key
    assert key == ObjectKey(path) and hash(key) == hash(ObjectKey(path))


@quietly
@given(PATHS, PATHS)
def test_joining_and_taking_apart(above: str, below: str) -> None:
    key = ObjectKey(above) / below
    assert key.path == f"{above}/{below}"
    assert key.within(ObjectKey(above)) and key.within(None) and not ObjectKey(above).within(key)
    assert key.name == below.split("/")[-1]
    assert key.parent is not None and key.parent / key.name == key


@quietly
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_no_key_leads_out_of_its_root(text: str) -> None:
    try:
        key = ObjectKey(text)
    except InvalidKey:
        return
    assert os.path.normpath(os.path.join("/root", key.path)) == f"/root/{key.path}"
    assert "\0" not in key.path


@quietly
@given(st.lists(st.sampled_from([".", "..", "", "a", "b.tmp", "..."]), min_size=1, max_size=6))
def test_traversal_is_refused(segments: list[str]) -> None:
    if {"", ".", "..", "b.tmp"} & set(segments):
        with pytest.raises(InvalidKey):
            ObjectKey("/".join(segments))
        with pytest.raises(InvalidKey):
            ObjectKey.of(*segments)
    else:
        assert ObjectKey.of(*segments).segments == tuple(segments)


@quietly
@given(st.lists(PATHS, max_size=10))
def test_order_is_that_of_the_bytes(paths: list[str]) -> None:
    assert [key.path for key in sorted(map(ObjectKey, paths))] == sorted(paths, key=str.encode)


def test_limits() -> None:
    assert ObjectKey("x" * MAX_SEGMENT_BYTES).name == "x" * MAX_SEGMENT_BYTES
    assert ObjectKey("é" * (MAX_SEGMENT_BYTES // 2))
    longest = "/".join(["x" * 199] * 5)[:MAX_BYTES]
    assert ObjectKey(longest)
    for path in ("x" * (MAX_SEGMENT_BYTES + 1), "é" * (MAX_SEGMENT_BYTES // 2 + 1), "x/" * (MAX_BYTES // 2) + "x"):
        with pytest.raises(InvalidKey, match="bytes"):
            ObjectKey(path)


def test_message_names_the_text_and_the_reason() -> None:
    with pytest.raises(InvalidKey, match=r"'a/\.\./b'.*'\.\.'"):
        ObjectKey("a/../b")
    with pytest.raises(InvalidKey, match="slash"):
        ObjectKey.of("packs", "a/b")
    with pytest.raises(InvalidKey):
        ObjectKey.of()
    with pytest.raises(InvalidKey):
        ObjectKey("a") / "../b"


def test_top_has_no_parent_and_keys_are_frozen() -> None:
    key = ObjectKey("a")
    assert key.parent is None
    with pytest.raises(AttributeError):
        key.path = "../b"  # type: ignore[misc]

"""The only way to name an object."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from functools import cached_property

MAX_BYTES = 1000  #: of a whole key, in UTF-8
MAX_SEGMENT_BYTES = 200  #: leaves room for a temporary's suffix within the 255 bytes of a POSIX name
TEMPORARY = ".tmp"  #: the end of every temporary's name, hence never the end of an object's


class InvalidKey(ValueError):
    """The text cannot name an object; the message says why."""


@dataclass(frozen=True, order=True)
class ObjectKey:
    """A relative, slash-separated name such as ``packs/000001/x.pack``; also names the folder given to ``list``.

    Keys compare as text, which is the order of their UTF-8 bytes and the order in which object stores list.
    A key that leads out of the store cannot be built.

    :raises InvalidKey: empty; absolute; an empty, ``.`` or ``..`` segment; a control character, backslash or lone
        surrogate; a segment ending in ``.tmp`` or longer than 200 bytes; more than 1000 bytes in all.
    """

    path: str

    def __post_init__(self) -> None:
        reason = _objection(self.path)
        if reason:
            raise InvalidKey(f"{self.path[:MAX_BYTES]!r} cannot name an object: {reason}")

    @classmethod
    def of(cls, *segments: str) -> ObjectKey:
        """The key made of these segments.

        :raises InvalidKey: as for the key itself, or a segment holds a slash.
        """
        for segment in segments:
            if "/" in segment:
                raise InvalidKey(f"{segment!r} cannot be one segment: it holds a slash")
        return cls("/".join(segments))

    @cached_property
    def segments(self) -> tuple[str, ...]:
        return tuple(self.path.split("/"))

    @property
    def name(self) -> str:
        """The last segment."""
        return self.segments[-1]

    @property
    def parent(self) -> ObjectKey | None:
        """The folder that holds the object; None at the top."""
        folder = self.path.rpartition("/")[0]
        return ObjectKey(folder) if folder else None

    def within(self, folder: ObjectKey | None) -> bool:
        """Whether the object lies in the folder, at any depth. Everything lies in None."""
        return folder is None or self.path.startswith(f"{folder.path}/")

    def __truediv__(self, below: str) -> ObjectKey:
        return ObjectKey(f"{self.path}/{below}")

    def __str__(self) -> str:
        return self.path


def _objection(path: str) -> str:
    """Why the text cannot be a key; empty if it can."""
    try:
        size = len(path.encode())
    except UnicodeEncodeError:
        return "it is not valid Unicode (a lone surrogate)"
    if not path:
        return "it is empty"
    if path.startswith("/"):
        return "it is absolute"
    if size > MAX_BYTES:
        return f"it has {size} bytes, more than {MAX_BYTES}"
    if "\\" in path or any(unicodedata.category(character) == "Cc" for character in path):
        return "it holds a backslash or control character"
    for segment in path.split("/"):
        if segment in ("", ".", ".."):
            return f"segment {segment!r} is not a name"
        if segment.endswith(TEMPORARY):
            return f"segment {segment!r} ends in {TEMPORARY}, which is kept for temporaries"
        if len(segment.encode()) > MAX_SEGMENT_BYTES:
            return f"segment {segment!r} has more than {MAX_SEGMENT_BYTES} bytes"
    return ""

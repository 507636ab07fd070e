"""JSON documents that carry their own digest: commits, runs, intents, the store's marker.

``{"body": {...}, "digest": "<blake3 of the body's canonical bytes>"}``. Canonical: keys sorted, no spaces, ASCII.
"""

from __future__ import annotations

import json
from typing import Any

from blake3 import blake3

from ..errors import CorruptCheckpoint

VERSION = 1
LIMIT = 64 << 20  #: bytes of the largest document that is read

Body = dict[str, Any]


def canonical(body: object) -> bytes:
    """The one encoding of a JSON value that digests are taken of."""
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def encode(kind: str, body: Body) -> bytes:
    body = {**body, "kind": kind, "version": VERSION}
    return canonical({"body": body, "digest": blake3(canonical(body)).hexdigest()})


def decode(data: bytes, name: object, *kinds: str) -> Body:
    """The body of the document in `data`, which must be of one of `kinds`.

    :raises CorruptCheckpoint: it is not such a document, or not what was written. The message names the object.
    """
    if len(data) > LIMIT:
        raise CorruptCheckpoint(f"{name}: {len(data)} bytes are more than any document of this format has")
    try:  # the parser itself bounds the nesting: RecursionError
        document = loads(data)
        if (
            not isinstance(document, dict)
            or set(document) != {"body", "digest"}
            or not isinstance(document["body"], dict)
        ):
            raise ValueError("no body and digest")
        body: Body = document["body"]
        digest = blake3(canonical(body)).hexdigest()
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"{name}: not a document of this format: {error}") from error
    if digest != document["digest"]:
        raise CorruptCheckpoint(f"{name}: its digest is wrong, so it is not what was written")
    if body.get("version") != VERSION:
        raise CorruptCheckpoint(f"{name}: format version {body.get('version')!r}; this program reads {VERSION}")
    if body.get("kind") not in kinds:
        raise CorruptCheckpoint(f"{name}: is a {body.get('kind')!r} where a {' or '.join(kinds)} was expected")
    return body


def loads(data: bytes) -> Any:
    """What untrusted JSON holds.

    :raises ValueError: it is none, has a key twice in one object, or NaN or Infinity. :raises RecursionError: too deep.
    """
    return json.loads(data, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key appears twice")
    return found


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not allowed")

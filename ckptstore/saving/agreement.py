"""The plan's collective: ranks learn who else holds what they hold, and prove that it is the same.

Each slice's name decides which rank judges it (the *judge*); holders send it one row a slice, and it answers with the
ranks that hold the slice too. So no rank sees the whole job's table.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from ..agent.submission import key_from_json, key_to_json
from ..errors import ReplicaMismatch, StateError, by_name
from ..format.commit import replica_mismatch
from ..format.model import VALUE, SliceKey
from ..group import Group

log = logging.getLogger("ckptstore")

_MAX_PROBLEMS = 20  # named in one error


@dataclass(frozen=True, slots=True)
class Row:
    """What one rank says about a slice it holds."""

    key: SliceKey
    policy: str
    alias: str  #: the name whose bytes these are, or ""
    digest: str

    def to_json(self) -> list[Any]:
        return [key_to_json(self.key), self.policy, self.alias, self.digest]


def holders(group: Group, rows: Sequence[Row]) -> list[tuple[int, ...]]:
    """The ranks that hold each of `rows`, in order of the rows; where one rank's content counts, that rank alone.

    :raises ReplicaMismatch: ranks hold different content under one name; on all ranks alike.
    :raises StateError: shapes or element types differ, or boxes leave a part of a tensor to nobody.
    :raises CheckpointError: another rank died or stopped.
    """
    letters: list[list[Row]] = [[] for _ in range(group.size)]
    sent: list[tuple[int, int]] = []
    for row in rows:
        judge = int.from_bytes(blake3(row.key.name.encode()).digest(8), "little") % group.size
        sent.append((judge, len(letters[judge])))
        letters[judge].append(row)
    received = group.exchange([_dump([row.to_json() for row in letter]) for letter in letters])
    cases = [[Row(key_from_json(row[0]), *row[1:]) for row in json.loads(letter)] for letter in received]
    verdicts, problems = _judge(cases)
    answers = [json.loads(answer) for answer in group.exchange([_dump(verdict) for verdict in verdicts])]
    _raise_any([json.loads(found) for found in group.gather(_dump(problems[:_MAX_PROBLEMS]))])
    return [tuple(answers[judge]["classes"][answers[judge]["rows"][at]]) for judge, at in sent]


def _judge(cases: list[list[Row]]) -> tuple[list[dict[str, Any]], list[list[str]]]:
    """Verdicts for each rank that sent rows, and what is wrong."""
    held: dict[tuple[object, ...], dict[int, Row]] = {}
    names: dict[tuple[str, int], list[tuple[object, ...]]] = {}
    for rank, rows in enumerate(cases):
        for row in rows:
            identity = row.key.identity
            if identity not in held:
                held[identity] = {}
                names.setdefault((row.key.name, row.key.rank), []).append(identity)
            held[identity][rank] = row
    problems: list[list[str]] = []
    classes: dict[tuple[object, ...], tuple[int, ...]] = {}
    for identities in names.values():
        problems += _whole([held[identity] for identity in identities])
    for identity, by_rank in held.items():
        problems += _equal(by_rank)
        ranks = tuple(sorted(by_rank))
        first = by_rank[ranks[0]]
        classes[identity] = ranks if first.policy == "replica" else ranks[:1]
    verdicts = []
    for rows in cases:
        table: dict[tuple[int, ...], int] = {}
        found = [table.setdefault(classes[row.key.identity], len(table)) for row in rows]
        verdicts.append({"classes": list(table), "rows": found})
    return verdicts, problems


def _equal(by_rank: dict[int, Row]) -> list[list[str]]:
    """What is wrong with the ranks that say they hold the same slice."""
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, row in sorted(by_rank.items()):
        groups.setdefault((row.digest, row.alias), []).append(rank)
    if len(groups) == 1:
        return []
    row = next(iter(by_rank.values()))
    first, second = list(groups.values())[:2]
    if row.policy == "buffer":
        log.warning(
            "buffer %r differs between ranks %s and %s; rank %d's is saved. per_rank=[%r] keeps each rank's own",
            *(row.key.name, first, second, first[0], row.key.name),
        )
        return []
    if row.policy == "rank0":
        return []
    return [[ReplicaMismatch.__name__, replica_mismatch(row.key.name, first, second)]]


def _whole(found: list[dict[int, Row]]) -> list[list[str]]:
    """What is wrong with the boxes under one name: they must be boxes of one tensor, and tile it."""
    keys = [next(iter(by_rank.values())).key for by_rank in found]
    first = keys[0]
    if first.dtype == VALUE and len(keys) == 1:
        return []
    ranks = [sorted(by_rank) for by_rank in found]
    for key, holders in zip(keys, ranks, strict=True):
        if (key.dtype, key.shape) != (first.dtype, first.shape):
            what = (
                f"{first.dtype}{list(first.shape)} on ranks {ranks[0]}, {key.dtype}{list(key.shape)} on ranks {holders}"
            )
            return [[StateError.__name__, f"{first.name!r} is not one tensor: {what}"]]
    boxes = sorted((key.box for key in keys), key=lambda box: box.offset)
    for index, box in enumerate(boxes):
        for other in boxes[index + 1 :]:
            if other.offset[:1] >= tuple(a + n for a, n in zip(box.offset[:1], box.shape[:1], strict=True)):
                break  # sorted: nothing further on can overlap
            if box.intersect(other):
                return [[StateError.__name__, f"{first.name!r}: boxes {box} and {other} overlap without being equal"]]
    total = 1
    for size in first.shape:
        total *= size
    missing = total - sum(box.numel for box in boxes)
    if missing:
        return [[StateError.__name__, f"{first.name!r}: {missing} of its {total} elements are held by no rank"]]
    return []


def _raise_any(found: list[list[list[str]]]) -> None:
    problems = [problem for answers in found for problem in answers]
    if problems:
        messages = "; ".join(message for _, message in problems[:_MAX_PROBLEMS])
        raise by_name(problems[0][0], messages)


def _dump(found: object) -> bytes:
    return json.dumps(found, separators=(",", ":")).encode()

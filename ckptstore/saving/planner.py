"""The plan of this rank, made once for each structure of the state and then only checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from ..agent.submission import RankPlan
from ..errors import ConfigError
from ..format.model import VALUE, SliceKey, whole
from ..group import Group
from . import agreement, plan
from .agreement import Row
from .digest import tensor_digest, value_digest

if TYPE_CHECKING:
    from ..state import Captured


@dataclass(frozen=True, slots=True)
class Role:
    """What this rank does about a slice that it holds."""

    owned: bool
    replicated: bool  #: others must hold the same
    across: bool  #: some of the others on other nodes


@dataclass(frozen=True)
class SavePlan:
    """:ivar rank_plan: what the agent is told. :ivar size: bytes of the segment before the values."""

    structure: list[Any]
    rank_plan: RankPlan
    size: int
    values: Mapping[tuple[str, int], Role]
    seldom: list[tuple[SliceKey, bool]] = field(default_factory=list)  #: replicas compared now and then; across nodes?


class Planner:
    """Makes and keeps the plan. When to make it anew, all ranks together, is the caller's to know."""

    def __init__(self, group: Group, node: str, settings: Mapping[str, Any]) -> None:
        """:param settings: those that all ranks must have alike."""
        self.group, self.node, self.settings = group, node, dict(settings)
        self.current: SavePlan | None = None
        self.holders: dict[SliceKey, tuple[int, ...]] = {}  #: the ranks that hold each of this rank's slices

    def fits(self, captured: Captured) -> bool:
        """Whether the plan at hand is one for this structure. No collective."""
        return self.current is not None and self.current.structure == _structure(captured)

    def make(self, captured: Captured) -> SavePlan:
        """A new plan. Collective.

        :raises ReplicaMismatch, StateError: on every rank alike. :raises ConfigError: ranks' settings differ.
        """
        structure = _structure(captured)
        held = agreement.holders(self.group, _rows(captured))
        mine = blake3(repr(structure).encode()).hexdigest()
        told = json.dumps([self.node, mine, self.settings]).encode()
        ranks = [json.loads(found) for found in self.group.gather(told)]
        node_of, fingerprint = [node for node, *_ in ranks], blake3(repr(ranks).encode()).hexdigest()
        for rank, (_, _, settings) in enumerate(ranks):
            if settings != ranks[0][2]:
                raise ConfigError(f"ranks 0 and {rank} differ in their settings: {ranks[0][2]} and {settings}")
        nodes = list(dict.fromkeys(node_of))

        rank, tensors = self.group.rank, captured.tensors
        tensor_holders = self.holders = dict(zip((t.key for t in tensors), held, strict=False))
        chunks, empty = self._owned(captured, tensor_holders)

        def role(holders: tuple[int, ...]) -> Role:
            replicated = len(holders) > 1 and rank in holders
            across = replicated and len({node_of[holder] for holder in holders}) > 1
            return Role(False, replicated, across)

        replicas: dict[tuple[int, ...], list[SliceKey]] = {}
        for tensor in tensors:
            if tensor.alias_of is None and role(tensor_holders[tensor.key]).replicated:
                replicas.setdefault(tensor_holders[tensor.key], []).append(tensor.key)
        small, large = list[tuple[SliceKey, bool]](), list[tuple[SliceKey, bool]]()
        for holders, keys in sorted(replicas.items()):
            always = set(plan.witnesses(keys, holders))
            for key in keys:
                (small if key in always else large).append((key, role(holders).across))
        layout = plan.lay_out(chunks, small)
        values = {}
        for value, holders in zip(captured.values, held[len(tensors) :], strict=True):
            shared = role(holders)
            values[value.name, value.rank] = Role(holders[0] == rank, shared.replicated, shared.across)
        rank_plan = RankPlan(
            fingerprint=fingerprint,
            rank=rank,
            world_size=self.group.size,
            node=nodes.index(self.node),
            nodes=len(nodes),
            local_ranks=tuple(r for r, node in enumerate(node_of) if node == self.node),
            chunks=layout.chunks,
            witnesses=layout.witnesses,
            empty=tuple(empty),
            layouts=captured.layouts,
        )
        self.current = SavePlan(structure, rank_plan, layout.size, values, large)
        return self.current

    def _owned(
        self, captured: Captured, holders: Mapping[SliceKey, tuple[int, ...]]
    ) -> tuple[list[plan.Chunk], list[SliceKey]]:
        """The chunks that this rank writes, and the slices without elements that it lists."""
        rank = self.group.rank
        aliases: dict[SliceKey, list[SliceKey]] = {}
        classes: dict[tuple[int, ...], list[SliceKey]] = {}
        empty = []
        for tensor in captured.tensors:
            key, ranks = tensor.key, holders[tensor.key]
            if key.nbytes == 0:
                if ranks[0] == rank:
                    empty.append(key)
            elif tensor.alias_of is not None and holders.get(tensor.alias_of) == ranks:
                aliases.setdefault(tensor.alias_of, []).append(key)
            elif rank in ranks:
                classes.setdefault(ranks, []).append(key)
        chunks = []
        for ranks, keys in sorted(classes.items()):
            grid = plan.chunk_grid(keys, aliases, self.settings["chunk_size"])
            owners = plan.share(grid, ranks)
            chunks += [chunk for chunk, owner in zip(grid, owners, strict=True) if owner == rank]
        return chunks, empty


def _structure(captured: Captured) -> list[Any]:
    tensors: list[Any] = [(t.key, t.policy, t.alias_of) for t in captured.tensors]
    return tensors + [(v.name, v.rank, v.policy) for v in captured.values]


def _rows(captured: Captured) -> list[Row]:
    rows = [
        Row(t.key, t.policy, t.alias_of.name if t.alias_of else "", tensor_digest(t.tensor).hex())
        for t in captured.tensors
    ]
    for value in captured.values:
        size = (len(value.data),)
        key = SliceKey(value.name, value.rank, VALUE, size, whole(size))
        rows.append(Row(key, value.policy, "", value_digest(value.data).hex()))
    return rows

"""Where everything lies below a store's URL. Numbers are padded, so that listings are in order.

::

    ckptstore.json                                        format version; written twice at first use
    runs/<run>.json                                       one per start that saves
    intents/<run>.<ordinal>.<node>.json                   what a save in flight writes and may reference
    packs/<run>/<ordinal>/<node>-<incarnation>-<i>.pack   chunks, end to end
    parts/<run>/<ordinal>/<node>.arrow                    one node's slices -> chunks
    commits/<step>.<run>.<generation>.json                the slot: a commit, or `aborted`
"""

from __future__ import annotations

from dataclasses import dataclass

from backends.key import ObjectKey

MARKER = ObjectKey("ckptstore.json")
RUNS = ObjectKey("runs")
COMMITS = ObjectKey("commits")
INTENTS = ObjectKey("intents")


def run_key(run: int) -> ObjectKey:
    return RUNS / f"{run:06d}.json"


@dataclass(frozen=True, order=True, slots=True)
class Slot:
    """The name of a commit, filled once: with the commit, or with `aborted`."""

    step: int
    run: int
    generation: int

    @property
    def key(self) -> ObjectKey:
        return COMMITS / f"{self.step:012d}.{self.run:06d}.{self.generation:03d}.json"

    def to_json(self) -> list[int]:
        return [self.step, self.run, self.generation]

    def __str__(self) -> str:
        return str(self.key)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try to save one step: numbered within its run, the same on every rank."""

    run: int
    ordinal: int
    step: int
    generation: int

    @property
    def slot(self) -> Slot:
        return Slot(self.step, self.run, self.generation)

    def to_json(self) -> list[int]:
        return [self.run, self.ordinal, self.step, self.generation]

    def part(self, node: int) -> ObjectKey:
        return ObjectKey(f"parts/{self.run:06d}/{self.ordinal:06d}/{node:05d}.arrow")

    def pack_prefix(self, node: int) -> str:
        """What the names of all this node's packs begin with, those of temporary objects too."""
        return f"packs/{self.run:06d}/{self.ordinal:06d}/{node:05d}-"

    def pack(self, node: int, incarnation: str, index: int) -> ObjectKey:
        """An agent that takes over another's save must not meet its packs, whence the incarnation."""
        return ObjectKey(f"{self.pack_prefix(node)}{incarnation}-{index:04d}.pack")

    def intent(self, node: int) -> ObjectKey:
        return INTENTS / f"{self.run:06d}.{self.ordinal:06d}.{node:05d}.json"


def parse_run(key: ObjectKey) -> int | None:
    """The run's number, or None for a name that is not a run's."""
    stem = _stem(key)
    return int(stem) if stem.isdecimal() and run_key(int(stem)) == key else None


def parse_slot(key: ObjectKey) -> Slot | None:
    """The slot that has this name, or None for a name that is no slot's."""
    numbers = _stem(key).split(".")
    if len(numbers) != 3 or not all(n.isdecimal() and len(n) <= 18 for n in numbers):
        return None
    slot = Slot(*map(int, numbers))
    return slot if slot.key == key else None


def _stem(key: ObjectKey) -> str:
    return key.name.removesuffix(".json") if key.name.endswith(".json") else ""

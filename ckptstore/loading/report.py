"""What a load did."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..format.keys import Slot


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What `load` did on this rank.

    :ivar step: of the checkpoint that was loaded; None if the store is empty, and nothing was changed.
    :ivar values: the plain values of the checkpoint, nested as the state given is.
    :ivar missing: names that the state has and the checkpoint does not; they kept what they held.
    :ivar source: where the bytes came from: ``storage``, or ``none``.
    :ivar seconds: from the call to the end.
    :ivar bytes_read: bytes this rank read from storage, and `requests` how many requests it took.
    :ivar fallbacks: newer checkpoints that did not verify, each as its step and what is wrong with it.
    :ivar slot: the name of the checkpoint.
    """

    step: int | None
    values: dict[str, object] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    source: str = "none"
    seconds: float = 0.0
    bytes_read: int = 0
    requests: int = 0
    fallbacks: list[tuple[int, str]] = field(default_factory=list)
    slot: Slot | None = None

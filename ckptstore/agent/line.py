"""The agent's end of one rank's connection."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from backends import sharedmem

from . import wire
from .submission import RankPlan

log = logging.getLogger("ckptstore.agent")


@dataclass(eq=False)
class Client:
    """One rank's connection. `ranks`: the (run, rank) it has been, known from its first plan on."""

    socket: socket.socket
    pid: int
    settings: Mapping[str, float] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    plans: dict[tuple[int, str], RankPlan] = field(default_factory=dict)
    ranks: set[tuple[int, int]] = field(default_factory=set)
    closed: bool = False
    _sending: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def tell(self, message: wire.Message) -> None:
        """Send, if the trainer is still there."""
        try:
            async with self._sending:
                await sharedmem.asend(self.socket, wire.pack(message))
        except OSError:
            log.info("trainer %d is not there to hear: %s", self.pid, message["type"])

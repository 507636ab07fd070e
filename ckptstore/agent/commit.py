"""The last step of a save: whoever sees all parts fills the slot. No committer, no collective, no trainer needed."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from backends.base import Backend
from backends.errors import AlreadyExists, BackendError, NotFound, OutcomeUnknown
from backends.key import ObjectKey

from ..errors import Superseded
from ..format import commit as commits
from ..format import part as part_format
from ..format.commit import Aborted, Commit
from ..format.keys import Attempt
from ..format.part import Part
from ..repo import lineage

log = logging.getLogger("ckptstore.agent")

_FIRST_POLL, _LAST_POLL = 0.01, 1.0  # seconds between looks at the slot


async def settle(
    backend: Backend, attempt: Attempt, nodes: int, seen: dict[int, tuple[bytes, Part]]
) -> Commit | Aborted:
    """Wait until the slot of `attempt` is filled, filling it as soon as all parts are there; say with what.

    `seen`: the parts known so far, by node; filled with those found, so that a caller whose deadline passes can name
    the nodes it waited for.
    """
    delay = _FIRST_POLL
    while True:
        found = await lineage.read_slot(backend, attempt.slot)
        if found is not None:
            return await fill(backend, found)  # whose AlreadyExists says that the name is durable, too
        missing = [node for node in range(nodes) if node not in seen]
        await asyncio.gather(*(look(backend, attempt, node, seen) for node in missing))
        if len(seen) == nodes:
            return await fill(backend, commits.assemble(attempt, [seen[node] for node in range(nodes)]))
        await asyncio.sleep(delay)
        delay = min(delay * 2, _LAST_POLL)


async def look(backend: Backend, attempt: Attempt, node: int, seen: dict[int, tuple[bytes, Part]]) -> None:
    """Put the node's part into `seen` if it is there."""
    with suppress(NotFound):
        seen[node] = await _read_part(backend, attempt, node)


async def _read_part(backend: Backend, attempt: Attempt, node: int) -> tuple[bytes, Part]:
    key = attempt.part(node)
    data = await backend.get(key, limit=part_format.LIMIT)
    return data, part_format.decode(data, key)


async def fill(backend: Backend, content: Commit | Aborted) -> Commit | Aborted:
    """Fill the slot with `content` unless it is filled already; return what it holds in the end."""
    slot = content.attempt.slot
    try:
        await backend.put_if_absent(slot.key, commits.encode(content))
    except (AlreadyExists, OutcomeUnknown):
        found = await lineage.read_slot(backend, slot)
        if found is None:
            raise
        return found
    log.info("%s: %s", slot, "committed" if isinstance(content, Commit) else f"aborted: {content.reason}")
    return content


async def check_outrun(backend: Backend, attempt: Attempt) -> None:
    """To be asked after the commit and before anyone is told that it is durable.

    :raises Superseded: a newer run resumed before this step, so the commit is not part of the history.
    """
    history = lineage.History(tuple(await lineage.read_runs(backend)), ())
    newer = history.outran(attempt.slot)
    if newer is not None:
        raise Superseded(
            f"step {attempt.step}: run {newer.number} resumed from step {newer.resumed_from} after this one (run "
            f"{attempt.run}) began, so what run {attempt.run} saves now is not part of the history any more. "
            f"Another job writes to {backend.url}: stop one of the two"
        )


async def write_part(backend: Backend, attempt: Attempt, node: int, part: Part) -> tuple[bytes, Part]:
    """The node's part: ours, or the one that an agent before us wrote, which then counts."""
    data = part_format.encode(part)
    try:
        await backend.put_if_absent(attempt.part(node), data)
    except (AlreadyExists, OutcomeUnknown):
        return await _read_part(backend, attempt, node)
    return data, part


async def discard(backend: Backend, keys: list[str]) -> None:
    """Delete what an attempt that failed has written; what cannot be deleted is left to the collector."""
    for name in keys:
        try:
            await backend.delete(ObjectKey(name))
        except NotFound:
            pass
        except BackendError as error:
            log.warning("%s stays until it is collected: %s", name, error)

"""Everything ckptstore raises, in one tree.

::

    CheckpointError
    ├── ConfigError                  a setting or URL that cannot be used
    ├── StateError                   the state given to save or load
    │   ├── UnsupportedValue         a leaf that is neither tensor nor plain data
    │   ├── ReplicaMismatch          one name, different content on different ranks
    │   └── StateMismatch            the checkpoint does not fit the state to load into
    ├── LineageError                 the save has no place in this store's history
    │   ├── StepExists               the step is stored already
    │   └── Superseded               a newer run resumed before this step
    ├── StepNotFound                 no such checkpoint
    ├── SaveFailed                   the save did not become durable; nothing of it is visible
    │   ├── StorageFull              no space where the checkpoint should go
    │   ├── StructureChanged         the state got another structure on some ranks, not on all
    │   └── AgentLost                the agent died and no other could be started
    ├── OutcomeUnknown               storage stopped answering; the checkpoint may or may not exist
    ├── CorruptCheckpoint            stored bytes are not what was written
    ├── LoadIncomplete               save refused: a load failed half-way through this state
    └── WaitTimeout (TimeoutError)   waited as long as asked; the save goes on
"""

from __future__ import annotations


class CheckpointError(Exception):
    """Root of every error that ckptstore raises on purpose."""


class ConfigError(CheckpointError, ValueError):
    """A setting or URL cannot be used; the message names it and the remedy."""


class StateError(CheckpointError):
    """The state passed to save or load is at fault."""


class UnsupportedValue(StateError, TypeError):
    """A leaf of the state is neither a tensor nor plain data; the message gives its path."""


class ReplicaMismatch(StateError):
    """Ranks gave different content under one name; the message names tensor and ranks."""


class StateMismatch(StateError):
    """The checkpoint does not fit the state; the message lists every mismatch."""


class LineageError(CheckpointError):
    """The save has no place in the history of this store."""


class StepExists(LineageError):
    """The step is already stored in this lineage."""


class Superseded(LineageError):
    """A newer run resumed before this step, so this run's saves are no longer part of the history."""


class StepNotFound(CheckpointError, LookupError):
    """No checkpoint of that step exists in this lineage."""


class SaveFailed(CheckpointError):
    """The save was aborted; nothing of it is visible and training can go on."""


class StorageFull(SaveFailed):
    """Storage or memory had no room for the checkpoint."""


class StructureChanged(SaveFailed):
    """The state got another structure on some ranks and not on others; a save soon after plans anew on all."""


class AgentLost(SaveFailed):
    """The agent died before the save was durable and no other could be started."""


class OutcomeUnknown(CheckpointError):
    """Storage could not be reached to learn whether the commit stands."""


class CorruptCheckpoint(CheckpointError):
    """A stored object is not what was written; the message names the object."""


class LoadIncomplete(CheckpointError):
    """A load failed half-way, so the state in memory belongs to no step."""


class WaitTimeout(CheckpointError, TimeoutError):
    """The time-out given to a wait passed; the message says who was waited for."""


def named(name: str) -> type[CheckpointError] | None:
    """The class of this tree that has the name."""
    found = globals().get(name)
    return found if isinstance(found, type) and issubclass(found, CheckpointError) else None


def by_name(name: str, message: str) -> CheckpointError:
    """The error called `name`, for outcomes that arrive as text from the agent."""
    kind = named(name)
    return SaveFailed(f"{name}: {message}") if kind is None else kind(message)

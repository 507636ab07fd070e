"""Checkpoints that cost the training job nothing to save and seconds to recover.

The names below are loaded when first used, so that the agent, a process of its own, never imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import Settings as Settings
    from .errors import AgentLost as AgentLost
    from .errors import CheckpointError as CheckpointError
    from .errors import ConfigError as ConfigError
    from .errors import CorruptCheckpoint as CorruptCheckpoint
    from .errors import LineageError as LineageError
    from .errors import LoadIncomplete as LoadIncomplete
    from .errors import OutcomeUnknown as OutcomeUnknown
    from .errors import ReplicaMismatch as ReplicaMismatch
    from .errors import SaveFailed as SaveFailed
    from .errors import StateError as StateError
    from .errors import StateMismatch as StateMismatch
    from .errors import StepExists as StepExists
    from .errors import StepNotFound as StepNotFound
    from .errors import StorageFull as StorageFull
    from .errors import StructureChanged as StructureChanged
    from .errors import Superseded as Superseded
    from .errors import UnsupportedValue as UnsupportedValue
    from .errors import WaitTimeout as WaitTimeout
    from .loading.report import LoadReport as LoadReport
    from .saving.handle import SaveHandle as SaveHandle
    from .state import PerRank as PerRank
    from .state import Rank0 as Rank0
    from .state import Sharded as Sharded
    from .store import CheckpointStore as CheckpointStore
    from .store import load as load
    from .store import save as save
    from .store import wait as wait

from ._version import __version__ as __version__

_HOME = {
    "CheckpointStore": "store",
    "save": "store",
    "load": "store",
    "wait": "store",
    "Settings": "config",
    "SaveHandle": "saving.handle",
    "LoadReport": "loading.report",
    "Sharded": "state",
    "PerRank": "state",
    "Rank0": "state",
    "errors": "errors",
}
_ERRORS = (
    *("CheckpointError", "ConfigError", "StateError", "UnsupportedValue", "ReplicaMismatch", "StateMismatch"),
    *(
        "LineageError",
        "StepExists",
        "Superseded",
        "StepNotFound",
        "SaveFailed",
        "StorageFull",
        "StructureChanged",
        "AgentLost",
    ),
    *("OutcomeUnknown", "CorruptCheckpoint", "LoadIncomplete", "WaitTimeout"),
)
_HOME |= dict.fromkeys(_ERRORS, "errors")

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_HOME[name]}")
    value = module if name == "errors" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__

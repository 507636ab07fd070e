"""Settings of a store: each an argument of CheckpointStore and a CKPTSTORE_* variable; the argument wins."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ByteSize, Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from .errors import ConfigError

_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*")


def _seconds(value: object) -> object:
    if isinstance(value, str) and (match := _DURATION.fullmatch(value.lower())):
        number, unit = match.groups()
        if (unit or "s") in _SECONDS:
            return float(number) * _SECONDS[unit or "s"]
    return value


Duration = Annotated[float, BeforeValidator(_seconds), Field(gt=0)]  #: seconds, or "10min", "7d", "500ms"


def default_runtime_dir() -> Path:
    """One folder per user and machine: the user's own runtime folder where the system made one."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "ckptstore" if base else Path(tempfile.gettempdir()) / f"ckptstore-{os.getuid()}"


class Settings(BaseSettings):
    """What can be set. What later versions will add is refused until it works, rather than ignored."""

    model_config = SettingsConfigDict(env_prefix="CKPTSTORE_", extra="forbid", frozen=True, env_ignore_empty=True)

    url: str = Field(description="where checkpoints lie: a path, file://, memory://")
    snapshot: Literal["blocking"] = Field("blocking", description="when save returns: once its copy is complete")
    check: Literal["checksum", "off"] = Field(
        "checksum", description="proof against torn snapshots; blocking needs none"
    )
    check_replicas: int = Field(
        100, ge=1, description="every how many saves large replicas are compared; small ones always are"
    )
    buffers: int = Field(2, ge=1, le=16, description="snapshots held in host memory at a time")
    host_memory: ByteSize | None = Field(None, description="bytes that this rank's snapshots may take; none: no limit")
    on_busy: Literal["wait"] = Field("wait", description="what a save does while all buffers are being uploaded")
    on_error: Literal["warn", "raise"] = Field(
        "warn", description="what the next save does about one that failed: log it, or raise it"
    )
    replicas: int = Field(0, ge=0, le=0, description="snapshots kept in peers' memory")
    keep: Literal["all"] = Field("all", description="which checkpoints are retained")
    compression: Literal["none"] = Field("none", description="compression of chunks")
    chunk_size: ByteSize = Field(ByteSize(16 << 20), description="bytes of a chunk: what is hashed, deduplicated, read")
    dedup_max_age: Duration = Field(7 * 86400.0, description="chunks older than this are written anew")
    io_concurrency: int = Field(8, ge=1, le=256, description="reads in flight while loading")
    timeout: Duration = Field(600.0, description="deadline of a save's upload and of each wait for other ranks")
    agent_linger: Duration = Field(600.0, description="how long an agent outlives trainers that died without close()")
    runtime_dir: Path = Field(default_factory=default_runtime_dir, description="folder of the agent's socket and log")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field("INFO", description="of the agent's log")

    @field_validator("chunk_size")
    @classmethod
    def _aligned(cls, value: int) -> int:
        if not 64 << 10 <= value <= 1 << 30 or value % 4096:
            raise ValueError("must be a multiple of 4 KiB between 64 KiB and 1 GiB")
        return value


def settings(**arguments: Any) -> Settings:
    """Settings from arguments (None: not given) over CKPTSTORE_* variables over the defaults.

    :raises ConfigError: naming each setting that is wrong, and its variable.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    try:
        return Settings(**given)
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(item) for item in error.errors())) from error


def _explain(item: Any) -> str:
    name = str(item["loc"][0]) if item["loc"] else "settings"
    if item["type"] == "missing":
        return f"{name} is not set: pass it to CheckpointStore or set CKPTSTORE_{name.upper()}"
    if item["type"] == "extra_forbidden":
        return f"{name} is no setting; there are: {', '.join(Settings.model_fields)}"
    return f"{name} (CKPTSTORE_{name.upper()}) = {item['input']!r}: {item['msg']}"

"""What trainers and their agent say to each other, and where they meet.

They meet at a pathname socket in a folder that only this user can enter, named by user, store and wire version, so that
another user, another store or another version of this program never answers. Frames are JSON; segments travel as
descriptors beside them.

Trainer to agent: ``hello``, ``plan`` (a structure, once), ``submit`` (a snapshot; with its segment), ``refuse`` (this
rank's snapshot will not come), ``close``.
Agent to trainer: ``welcome``, ``refused``, ``accepted``, ``outcome``, ``closed``.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from ..errors import ConfigError

VERSION = 1
LIMIT = 256 << 20  #: bytes of the largest frame: the plan of a rank with some million slices
HELLO_LIMIT = 1 << 20

#: Variables that hold credentials or say where they are; the trainer's go to the agent with its hello.
CREDENTIALS = ("AWS_", "HADOOP_", "KRB5", "GOOGLE_", "AZURE_", "FSSPEC_")

#: What an agent does as its trainers have set it.
SETTINGS = ("timeout", "dedup_max_age", "agent_linger")

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Meeting:
    """The files by which one user's trainers and the agent of one store find each other."""

    socket: Path
    secret: Path
    lock: Path
    log: Path


def meeting(runtime_dir: Path, url: str) -> Meeting:
    """The meeting place of a store; `url` in its canonical form. Makes the folder.

    :raises ConfigError: the folder cannot be made, belongs to someone else, or others can enter it.
    """
    try:
        runtime_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = runtime_dir.lstat()
    except OSError as error:
        raise ConfigError(
            f"runtime_dir {runtime_dir}: {error}; set CKPTSTORE_RUNTIME_DIR to a folder of yours"
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"runtime_dir {runtime_dir} must be a folder that belongs to uid {os.getuid()} with mode 0700, "
            f"not {stat.filemode(found.st_mode)} of uid {found.st_uid}; mend it or set CKPTSTORE_RUNTIME_DIR"
        )
    name = blake3(f"{os.getuid()}\0{url}\0{VERSION}".encode()).hexdigest(8)
    base = runtime_dir / name
    if len(os.fsencode(base)) > 100:  # sun_path has room for 107
        raise ConfigError(f"runtime_dir {runtime_dir} is too long for a socket's address; set CKPTSTORE_RUNTIME_DIR")
    return Meeting(*(base.with_suffix(suffix) for suffix in (".sock", ".secret", ".lock", ".log")))


def secret(place: Meeting) -> str:
    """The secret both sides prove they can read; made by whoever comes first."""
    if not place.secret.exists():
        fresh = place.secret.with_suffix(f".{secrets.token_hex(4)}")
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(secrets.token_hex(32))
        with contextlib.suppress(FileExistsError):
            os.link(fresh, place.secret)
        fresh.unlink()
    fd = os.open(place.secret, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(fd) as file:
        status = os.fstat(fd)
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise ConfigError(f"{place.secret} can be read by others; delete it")
        return file.read(1024)


def node_identity(runtime_dir: Path) -> str:
    """Equal on ranks that share a runtime folder, and so an agent; different elsewhere, on any host or container."""
    found = runtime_dir.stat()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{found.st_dev}:{found.st_ino}"


def pack(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()


def unpack(data: bytes) -> Message:
    """:raises ValueError: not a message."""
    message = json.loads(data)
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise ValueError("not a message: no type")
    return message

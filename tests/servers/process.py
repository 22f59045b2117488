"""A server as a child process: started in a directory of its own, waited for, stopped or killed by its process id."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

# No server takes nearly as long, but an emulated one that is restarted on a machine with ten times the work that it can do.
PATIENCE_SECONDS: Final = 180.0


class ServerMissing(RuntimeError):
    """What a server needs is not installed here. The message says how to get it."""


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


class Process:
    """A server's process and its directory. `start` after `stop` or `kill` is a restart on the same data."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.directory = Path(tempfile.mkdtemp(prefix=f"perdure-{name}-"))
        self._process: subprocess.Popen[bytes] | None = None

    def start(
        self,
        command: Sequence[str],
        is_ready: Callable[[], bool],
        *,
        environment: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> None:
        """Start the server and return when it answers. Raises RuntimeError with its log when it does not."""
        with (self.directory / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=self.directory, env={**os.environ, **(environment or {})}, user=user
            )
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"{self.name} did not start:\n{self.log()[-2000:]}")
            time.sleep(0.02)

    def log(self) -> str:
        """What the server has said so far."""
        return (self.directory / "server.log").read_text(errors="replace")

    @property
    def pid(self) -> int:
        """The server's process id."""
        if self._process is None:
            raise RuntimeError(f"{self.name} is not running")
        return self._process.pid

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Ask the server to end, and wait until it has; killed when it takes too long."""
        if self._process is None:
            return
        self._process.send_signal(number)
        try:
            self._process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def kill(self) -> None:
        """End the server without giving it time to do anything."""
        self.stop(signal.SIGKILL)

    def remove(self) -> None:
        """Stop the server and delete its data."""
        self.stop()
        shutil.rmtree(self.directory, ignore_errors=True)

"""Real processes that do a job on a store, and can be stopped and killed.

They are forked from multiprocessing's fork server, which has imported everything once, so that one starts in milliseconds. They
report through a pipe; what must survive their death they write to a ledger.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Coroutine
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, TypeAlias

PATIENCE: Final = 90.0
CONTEXT: Final = multiprocessing.get_context("forkserver")

Job: TypeAlias = Callable[..., Coroutine[Any, Any, None]]


class ParentPipe:
    """A process's end of the pipe to the test."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def send(self, message: Any) -> None:
        self._pipe.send(message)

    async def receive(self) -> Any:
        """The next message of the test."""
        return await asyncio.to_thread(self._pipe.recv)


class Child:
    """A process that does a job. At the end of the test it is killed, if it still runs."""

    def __init__(self, job: Job, *args: Any) -> None:
        self._pipe, theirs = CONTEXT.Pipe()
        self._name = job.__name__
        self._process = CONTEXT.Process(target=_work, args=(job, theirs, *args), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def receive(self) -> Any:
        """The next message of the process. Fails the test if the process died, failed or is silent for too long."""
        assert self._pipe.poll(PATIENCE), f"{self._name} sent nothing for {PATIENCE:g} s"
        try:
            message = self._pipe.recv()
        except EOFError:
            raise AssertionError(f"{self._name} died") from None
        assert not isinstance(message, Failure), f"{self._name} failed:\n{message.text}"
        return message

    def send(self, message: Any) -> None:
        self._pipe.send(message)

    def stop(self) -> None:
        """SIGSTOP, as a debugger sends it."""
        os.kill(self.pid, signal.SIGSTOP)
        self.wait_until_stopped()

    def wait_until_stopped(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while (state := _state(self.pid)) != "T":
            assert state, f"{self._name} ended and did not stop, its last message: {self.receive()}"
            assert time.monotonic() < deadline, f"{self._name} does not stop"
            time.sleep(0.002)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Send SIGKILL, unless the process has ended."""
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def exit_code(self) -> int | None:
        """The exit code of the process, once it has exited; None when it goes on for too long."""
        self._process.join(PATIENCE)
        return self._process.exitcode

    def wait_for_exit(self) -> None:
        """Wait until the process exits. Fails the test unless its exit code is 0."""
        self._process.join(PATIENCE)
        if self._process.exitcode != 0:
            raise AssertionError(f"{self._name} ended with {self._process.exitcode}, its last message: {self.receive()}")


class Failure:
    """The traceback of what a job raised."""

    def __init__(self, text: str) -> None:
        self.text = text


def _state(pid: int) -> str:
    """The letter of the process's state in /proc; empty when it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except FileNotFoundError:
        return ""


def _work(job: Job, pipe: Connection, *args: Any) -> None:
    signal.alarm(3600)  # so that none outlives its test for long
    try:
        asyncio.run(job(ParentPipe(pipe), *args))
    except BaseException:
        pipe.send(Failure(traceback.format_exc()))
        raise

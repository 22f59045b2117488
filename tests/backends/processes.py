"""Real processes that do a job on a store, and can be stopped and killed.

They are forked from a server process that has imported everything once, so one is there in milliseconds and a campaign spends its
time on the store. What they have to say goes through a pipe; what must survive their death they write to a ledger.
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


class Voice:
    """A process's end of the pipe to the test."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def say(self, word: Any) -> None:
        self._pipe.send(word)

    async def heard(self) -> Any:
        """The next thing that the test says."""
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

    def hear(self) -> Any:
        """The next thing that the process says."""
        assert self._pipe.poll(PATIENCE), f"{self._name} has not said a word in {PATIENCE:g} s"
        try:
            word = self._pipe.recv()
        except EOFError:
            raise AssertionError(f"{self._name} died") from None
        assert not isinstance(word, Failure), f"{self._name} failed:\n{word.text}"
        return word

    def tell(self, word: Any) -> None:
        self._pipe.send(word)

    def stop(self) -> None:
        """SIGSTOP, as a laptop's lid or a debugger sends it."""
        os.kill(self.pid, signal.SIGSTOP)
        self.wait_until_stopped()

    def wait_until_stopped(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while (state := _state(self.pid)) != "T":
            assert state, f"{self._name} ended and did not stop, and said at last: {self.hear()}"
            assert time.monotonic() < deadline, f"{self._name} does not stop"
            time.sleep(0.002)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, unless it has ended."""
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def end(self) -> None:
        """Wait until it ends, which must be in good order."""
        self._process.join(PATIENCE)
        if self._process.exitcode != 0:
            raise AssertionError(f"{self._name} ended with {self._process.exitcode}, and said at last: {self.hear()}")


class Failure:
    """What a job raised."""

    def __init__(self, text: str) -> None:
        self.text = text


def _state(pid: int) -> str:
    """The letter that the kernel has for what a process does; nothing when it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except FileNotFoundError:
        return ""


def _work(job: Job, pipe: Connection, *args: Any) -> None:
    signal.alarm(3600)  # nothing here stays for ever, whatever became of the test
    try:
        asyncio.run(job(Voice(pipe), *args))
    except BaseException:
        pipe.send(Failure(traceback.format_exc()))
        raise

"""A thread that owns a connection: the reader, a transaction, and what the writer is made of."""

from __future__ import annotations

import contextlib
import queue
import sqlite3
import threading
import time
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

from perdure.backends.sqlite.calls import Call, Watcher, answer
from perdure.backends.sqlite.connection import DatabaseFile
from perdure.backends.sqlite.link import Link
from perdure.errors import PerdureError

MAX_BATCH: Final = 1000


class _Pause:
    """Asks a thread to close its connection and stand still."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.over = threading.Event()


class _Mark:
    """Asks a thread to tell when everything before this was answered."""

    def __init__(self, passed: Watcher) -> None:
        self.passed = passed


class _Stop:
    """Asks a thread to close its connection and end, and to tell the one who waits for that."""

    def __init__(self, done: Watcher | None) -> None:
        self.done = done


Message: TypeAlias = Call[Any] | Watcher | _Mark | _Pause | _Stop


# Connections that a child inherited although the parent could not close them in time: closing or finalising them here would
# disturb the parent's locks, so they are kept for ever.
_left_behind: list[Link | None] = []


class Worker:
    """A daemon thread with a connection of its own, started by the first call, that runs each call by itself."""

    def __init__(self, file: DatabaseFile, role: str, *, read_only: bool = False) -> None:
        self.file = file
        self._name = f"perdure-sqlite-{role}"
        self._read_only = read_only
        self._link: Link | None = None
        self._forget()

    def _forget(self) -> None:
        self._queue: queue.SimpleQueue[Message] = queue.SimpleQueue()
        # Held while the thread is being started, and over a fork.
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._pause: _Pause | None = None

    def put(self, message: Message) -> None:
        """Hand over a message; the answer comes through its future."""
        if self._thread is None:
            self.start()
        self._queue.put(message)

    async def answered(self) -> None:
        """Return when everything that was handed over so far was answered."""
        if self._thread is not None:
            self._queue.put(_Mark(passed := Watcher()))
            await passed.future

    def stop(self, done: Watcher | None = None) -> None:
        """Have the thread end once everything before this was answered, and tell `done`."""
        if self._thread is not None:
            self._queue.put(_Stop(done))
        elif done is not None:
            done.come()

    @property
    def started(self) -> bool:
        """Whether there is a thread."""
        return self._thread is not None

    def start(self) -> None:
        """Have a thread, if there is none yet."""
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                thread.start()
                self._thread = thread

    def begin_pause(self) -> None:
        """Before a fork: ask the thread to let go of the file, and keep it from being started."""
        self._lock.acquire()
        if self._thread is not None:
            self._pause = _Pause()
            self._queue.put(self._pause)

    def is_paused(self, deadline: float) -> bool:
        """Whether the thread has let go of the file; waits for it until `deadline` (monotonic)."""
        if self._thread is None:
            return True
        return self._pause is not None and self._pause.reached.wait(max(0.0, deadline - time.monotonic()))

    def has_ended(self, deadline: float) -> bool:
        """Whether the thread is no more; waits for it until `deadline` (monotonic)."""
        if self._thread is None or self._thread is threading.current_thread():
            return self._thread is None
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def end_pause(self) -> None:
        """After a fork, in the parent: go on."""
        if self._pause is not None:
            self._pause.over.set()
        self._pause = None
        self._lock.release()

    def start_over(self) -> None:
        """After a fork, in the child: the thread did not come along, and what was queued is the parent's."""
        _left_behind.append(self._link)
        self._link = None
        self._forget()

    def _work(self) -> None:
        while True:
            calls, other = self._take()
            if calls:
                self._answer_all(calls)
            if isinstance(other, _Stop):
                self._let_go()
                answer([other.done] if other.done is not None else [])
                return
            if other is not None:
                self._obey(other)
            del calls, other  # an idle thread must not keep the last results alive

    def _take(self) -> tuple[list[Call[Any]], Message | None]:
        """Everything queued, up to the first message that is not a call."""
        calls: list[Call[Any]] = []
        message = self._next()
        while isinstance(message, Call):
            calls.append(message)
            if len(calls) == MAX_BATCH or not self._queue.qsize():
                return calls, None
            message = self._queue.get()  # this thread alone takes, so what was counted is there
        return calls, message

    def _next(self) -> Message | None:
        return self._queue.get()

    def _obey(self, message: Message) -> None:
        if isinstance(message, _Mark):
            answer([message.passed])
        elif isinstance(message, _Pause):
            self._let_go()
            message.reached.set()
            message.over.wait()

    def _answer_all(self, calls: Sequence[Call[Any]]) -> None:
        for call in calls:
            self._run_alone(call)
            answer([call])

    def _run_alone(self, call: Call[Any]) -> None:
        try:
            call.value = call.verb(self._open())
        except PerdureError as refusal:
            call.fail(refusal, self.file.path)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the caller hears of it and the thread lives on
            call.fail(error, self.file.path)
            self._let_go()

    def _open(self) -> Link:
        if self._link is None:
            self._link = Link(self.file.connect(read_only=self._read_only))
        else:
            self.file.check()
        return self._link

    def _let_go(self) -> None:
        """Close the connection, which rolls back what is open.

        Done after every error but a refusal: the disk may have failed, or the error's traceback may keep a cursor alive and with
        it an old view of the database.
        """
        link, self._link = self._link, None
        if link is not None:
            with contextlib.suppress(sqlite3.Error):
                link.connection.close()

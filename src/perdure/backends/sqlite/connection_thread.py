"""A thread that owns a connection: the reader, a transaction, and the base of the writer."""

from __future__ import annotations

import contextlib
import queue
import sqlite3
import threading
import time
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

from perdure.aio.threads import start_thread
from perdure.backends.base.lifecycle import Watcher
from perdure.backends.sqlite.connection import DatabaseFile
from perdure.backends.sqlite.pending_call import PendingCall, deliver
from perdure.backends.sqlite.writer_connection import WriterConnection
from perdure.errors import PerdureError

MAX_BATCH: Final = 1000


class _Pause:
    """Asks a thread to close its connection and stand still."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.over = threading.Event()


class _Mark:
    """Asks a thread to wake the watcher once everything queued before it was delivered."""

    def __init__(self, passed: Watcher) -> None:
        self.passed = passed


class _Stop:
    """Asks a thread to close its connection and end, and to wake the watcher, if there is one, when that is done."""

    def __init__(self, done: Watcher | None) -> None:
        self.done = done


Message: TypeAlias = PendingCall[Any] | Watcher | _Mark | _Pause | _Stop


# Connections that a child inherited although the parent could not close them in time: closing or finalising them here would
# disturb the parent's locks, so they are kept for ever.
_left_behind: list[WriterConnection | None] = []


class ConnectionThread:
    """A daemon thread with a connection of its own, started by the first call. It runs each call by itself."""

    def __init__(self, file: DatabaseFile, role: str, *, read_only: bool = False) -> None:
        self.file = file
        self._name = f"perdure-sqlite-{role}"
        self._read_only = read_only
        self._connection: WriterConnection | None = None
        self._forget()

    def _forget(self) -> None:
        self._queue: queue.SimpleQueue[Message] = queue.SimpleQueue()
        # Held while the thread is being started, and over a fork.
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._pause: _Pause | None = None

    def put(self, message: Message) -> None:
        """Queue a message. The result of a call is delivered to its event loop."""
        if self._thread is None:
            self.start()
        self._queue.put(message)

    async def drain(self) -> None:
        """Return when everything queued so far was delivered."""
        if self._thread is not None:
            self._queue.put(_Mark(passed := Watcher()))
            await passed.future

    def stop(self, done: Watcher | None = None) -> None:
        """Have the thread end once everything queued before was delivered, and then wake `done`."""
        if self._thread is not None:
            self._queue.put(_Stop(done))
        elif done is not None:
            done.wake()

    @property
    def is_started(self) -> bool:
        """Whether there is a thread."""
        return self._thread is not None

    def start(self) -> None:
        """Start the thread, if there is none yet. Raises `PersistenceError` if that fails; the next call tries again."""
        with self._lock:
            if self._thread is None:
                self._thread = start_thread(self._name, self._work)

    def begin_pause(self) -> None:
        """Before a fork: ask the thread to close its connection, and keep it from being started."""
        self._lock.acquire()
        if self._thread is not None:
            self._pause = _Pause()
            self._queue.put(self._pause)

    def is_paused(self, deadline: float) -> bool:
        """Whether the thread has closed its connection; waits for that until `deadline` (monotonic)."""
        if self._thread is None:
            return True
        return self._pause is not None and self._pause.reached.wait(max(0.0, deadline - time.monotonic()))

    def has_ended(self, deadline: float) -> bool:
        """Whether the thread has ended; waits for that until `deadline` (monotonic)."""
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
        """After a fork, in the child: the thread is not there, and what was queued belongs to the parent."""
        _left_behind.append(self._connection)
        self._connection = None
        self._forget()

    def _work(self) -> None:
        while True:
            calls, other = self._take()
            if calls:
                self._run_all(calls)
            if isinstance(other, _Stop):
                self._close()
                if other.done is not None:
                    other.done.wake()
                return
            if other is not None:
                self._obey(other)
            del calls, other  # an idle thread must not keep the last results alive

    def _take(self) -> tuple[list[PendingCall[Any]], Message | None]:
        """Everything queued, up to the first message that is not a call."""
        calls: list[PendingCall[Any]] = []
        message = self._next()
        while isinstance(message, PendingCall):
            calls.append(message)
            if len(calls) == MAX_BATCH or not self._queue.qsize():
                return calls, None
            message = self._queue.get()  # does not block: only this thread takes from the queue, and it was not empty
        return calls, message

    def _next(self) -> Message | None:
        return self._queue.get()

    def _obey(self, message: Message) -> None:
        if isinstance(message, _Mark):
            message.passed.wake()
        elif isinstance(message, _Pause):
            self._close()
            message.reached.set()
            message.over.wait()

    def _run_all(self, calls: Sequence[PendingCall[Any]]) -> None:
        for call in calls:
            self._run_alone(call)
            deliver([call])

    def _run_alone(self, call: PendingCall[Any]) -> None:
        try:
            call.value = call.verb(self._open())
        except PerdureError as refusal:
            call.fail(refusal, self.file.path)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the caller gets it and the thread lives on
            call.fail(error, self.file.path)
            self._distrust()

    def _open(self) -> WriterConnection:
        if self._connection is None:
            self._connection = WriterConnection(self.file.connect(self, read_only=self._read_only))
        else:
            self.file.check(self)
        return self._connection

    def _distrust(self) -> None:
        """Close the connection after an error that is no refusal.

        The disk may have failed, or the error's traceback may keep a cursor alive and with it an old view of the database. Not
        while one of the files is lost: the connections that are open have the only way to the log, and the last one to close
        brings it into the database.
        """
        opened = self._connection
        if opened is not None:
            try:
                self.file.check(self)
            except PerdureError:
                with contextlib.suppress(sqlite3.Error):
                    opened.roll_back()
                return
        self._close()

    def _close(self) -> None:
        """Close the connection, which rolls back what is open."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self.file.forget(self)
            with contextlib.suppress(sqlite3.Error):
                connection.close()

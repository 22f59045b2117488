"""The writer: one thread through which all writes of this process to a file go, many in one commit.

It takes everything queued into one transaction, and delivers results only after COMMIT has returned. A refusal (`PerdureError`)
is raised before its verb wrote anything and fails alone. Any other error rolls the batch back, and its verbs are run again: first
with nothing deferred, since what is recorded already may be a lost reply, then one by one, so that only the culprit fails. After
an error of SQLite or the disk the connection is not trusted again: it is closed, and opened anew for the next batch; what a
failed COMMIT left behind is never reported as written.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from typing import Any, Final

from perdure.backends.base.lifecycle import Watcher
from perdure.backends.sql.dialect import SYNCHRONOUS_FULL
from perdure.backends.sqlite.connection import DatabaseFile, is_fault
from perdure.backends.sqlite.connection_thread import ConnectionThread, Message
from perdure.backends.sqlite.pending_call import PendingCall, deliver
from perdure.backends.sqlite.writer_connection import WriterConnection
from perdure.errors import PerdureError

POLL_EVERY: Final = 0.05


class Writer(ConnectionThread):
    """The thread through which all writes of this process go, and that notices the writes of other processes.

    `commits` counts the commits. `synchronous` is the setting in force, as SQLite reports it (2 is FULL).
    """

    def __init__(self, file: DatabaseFile) -> None:
        super().__init__(file, "writer")
        self.commits = 0
        self.synchronous: int | None = None
        self._watchers: list[Watcher] = []
        self._seen_version = 0
        self._poll_at = 0.0

    def start_over(self) -> None:
        super().start_over()
        self._watchers = []

    def _open(self) -> WriterConnection:
        known, opened = self._connection, super()._open()
        if opened is not known or (self.synchronous != SYNCHRONOUS_FULL and self.file.full):
            if self.file.full:
                opened.connection.execute("PRAGMA synchronous = FULL")
            self.synchronous = int(opened.connection.execute("PRAGMA synchronous").fetchall()[0][0])
            self._seen_version = opened.data_version()
            self._wake_watchers()  # each connection counts versions for itself, so changes since the last look are unknown
        return opened

    def _run_all(self, calls: Sequence[PendingCall[Any]]) -> None:
        together = [call for call in calls if call.needs_transaction or not self._runs_without_transaction(call)]
        if together:
            self._write(together)
        deliver(calls)
        if self._watchers:
            wakes = {call.wakes for call in calls if call.error is None}
            if True in wakes:
                self._wake_watchers()
            else:
                if "items" in wakes:
                    self._wake_watchers(only_items=True)
                self._poll()

    def _runs_without_transaction(self, call: PendingCall[Any]) -> bool:
        """Run a call that is alone, or probe for its result; False when it has to run in the transaction after all."""
        if call.probe is None:
            self._run_alone(call)
            return True
        try:
            call.value = call.probe(self._open())
        except Exception:  # noqa: BLE001 - the verb itself will meet the error, and report it
            self._distrust()
        return call.value is not None

    def _write(self, calls: Sequence[PendingCall[Any]]) -> None:
        """Run the calls in one transaction; if that fails, with nothing deferred, then one by one. Delivers nothing."""
        culprit = self._write_together(calls, defers=True)
        if culprit is not None and not is_fault(culprit):
            culprit = self._write_together(calls, defers=False)
        if culprit is None:
            return
        if len(calls) == 1:
            calls[0].fail(culprit, self.file.path)
            return
        for call in calls:
            self._write([call])

    def _write_together(self, calls: Sequence[PendingCall[Any]], *, defers: bool) -> BaseException | None:
        """Run the calls in one transaction. If one of them kept it from being committed: its error, and nothing was written."""
        try:
            connection = self._open()
            connection.begin(defers=defers)
            culprit = self._run(connection, calls)
            if culprit is None:
                connection.commit()
                self.commits += 1
                return None
        except BaseException as error:  # noqa: BLE001 - whatever it is, every caller gets it and the thread lives on
            self._distrust()
            for call in calls:
                call.fail(error, self.file.path)
            return None
        self._distrust()
        return culprit

    def _run(self, connection: WriterConnection, calls: Sequence[PendingCall[Any]]) -> Exception | None:
        try:
            for call in calls:
                call.error = None
                try:
                    call.value = call.verb(connection)
                except PerdureError as refusal:
                    call.error = refusal.with_traceback(None)  # it would keep the whole batch alive
                if not call.keeps_fences:
                    connection.fences.clear()
            connection.run_deferred()
        except Exception as error:  # noqa: BLE001 - the batch runs again, in the end call by call, and the culprit's caller gets it
            return error
        return None

    def _next(self) -> Message | None:
        if not self._watchers:
            return self._queue.get()
        try:
            return self._queue.get(timeout=POLL_EVERY)
        except queue.Empty:
            self._poll()
            return None

    def _obey(self, message: Message) -> None:
        if isinstance(message, Watcher):
            self._add_watcher(message)
        else:
            super()._obey(message)

    def _add_watcher(self, watcher: Watcher) -> None:
        try:
            connection = self._open()
            if not self._watchers:
                self._seen_version = connection.data_version()
            self._watchers.append(watcher)
        except Exception:  # noqa: BLE001 - the caller meets the error at its next verb
            self._distrust()
            watcher.wake()

    def _poll(self) -> None:
        """Wake the watchers when another connection has committed since the last look. At most once in POLL_EVERY."""
        now = time.monotonic()
        self._watchers = [watcher for watcher in self._watchers if not watcher.future.done()]
        if now < self._poll_at or not self._watchers:
            return
        self._poll_at = now + POLL_EVERY * 0.9
        try:
            seen, self._seen_version = self._seen_version, self._open().data_version()
            changed = seen != self._seen_version
        except Exception:  # noqa: BLE001 - as above
            self._distrust()
            changed = True
        if changed:
            self._wake_watchers()

    def _wake_watchers(self, *, only_items: bool = False) -> None:
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            if only_items and not watcher.wants_items:
                self._watchers.append(watcher)
            else:
                watcher.wake()

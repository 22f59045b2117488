"""The writer: one thread through which all writes of this process to a file go, many in one commit.

It takes all that is queued into one transaction, and answers only after COMMIT returned. A refusal (`PerdureError`) is raised
before its verb wrote anything and fails alone. Any other error rolls the batch back, and its verbs are run again: first with
nothing kept back, since what is recorded already may be a lost reply, then one by one, so that only the culprit fails. After an
error of SQLite or the disk the connection is not trusted again: it is closed, and opened anew for the next batch; what a failed
COMMIT left behind is never reported as written.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from typing import Any, Final

from perdure.backends.sqlite.calls import Call, Watcher, answer
from perdure.backends.sqlite.connection import DatabaseFile, is_fault
from perdure.backends.sqlite.link import Link
from perdure.backends.sqlite.worker import Message, Worker
from perdure.errors import PerdureError

POLL_EVERY: Final = 0.05
_FULL: Final = 2  # what PRAGMA synchronous answers for FULL


class Writer(Worker):
    """The thread through which all writes of this process go, and that notices the writes of others.

    `commits` counts what reached the disk. `synchronous` is the setting in force, as SQLite gave it back (2 is FULL).
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

    def _open(self) -> Link:
        known, link = self._link, super()._open()
        if link is not known or (self.synchronous != _FULL and self.file.full):
            connection = link.connection
            if self.file.full:
                connection.execute("PRAGMA synchronous = FULL")
            self.synchronous = int(connection.execute("PRAGMA synchronous").fetchall()[0][0])
            self._seen_version = link.data_version()
            self._wake_watchers()  # the version is each connection's own, so what happened meanwhile cannot be told
        return link

    def _answer_all(self, calls: Sequence[Call[Any]]) -> None:
        together = [call for call in calls if call.needs_transaction or not self._is_answered_without_transaction(call)]
        if together:
            self._write(together)
        answer(calls)
        if self._watchers:
            if any(call.wakes and call.error is None for call in calls):
                self._wake_watchers()
            else:
                self._poll()

    def _is_answered_without_transaction(self, call: Call[Any]) -> bool:
        if call.probe is None:
            self._run_alone(call)
            return True
        try:
            call.value = call.probe(self._open())
        except Exception:  # noqa: BLE001 - the verb itself will meet it, and report it
            self._let_go()
        return call.value is not None

    def _write(self, calls: Sequence[Call[Any]]) -> None:
        """Run the calls in one transaction; if that fails, with nothing kept back, then one by one. None is answered here."""
        culprit = self._failed_together(calls, defers=True)
        if culprit is not None and not is_fault(culprit):
            culprit = self._failed_together(calls, defers=False)
        if culprit is None:
            return
        if len(calls) == 1:
            calls[0].fail(culprit, self.file.path)
            return
        for call in calls:
            self._write([call])

    def _failed_together(self, calls: Sequence[Call[Any]], *, defers: bool) -> BaseException | None:
        """Run the calls in one transaction. If one of them kept that from being committed, its error, and nothing was written."""
        try:
            link = self._open()
            link.begin(defers=defers)
            culprit = self._run(link, calls)
            if culprit is None:
                link.commit()
                self.commits += 1
                return None
        except BaseException as error:  # noqa: BLE001 - whatever it is, every caller hears of it and the thread lives on
            self._let_go()
            for call in calls:
                call.fail(error, self.file.path)
            return None
        self._let_go()
        return culprit

    def _run(self, link: Link, calls: Sequence[Call[Any]]) -> Exception | None:
        try:
            for call in calls:
                call.error = None
                try:
                    call.value = call.verb(link)
                except PerdureError as refusal:
                    call.error = refusal.with_traceback(None)  # which would keep the whole batch alive
                if not call.keeps_fences:
                    link.fences.clear()
            link.write_kept_back()
        except Exception as error:  # noqa: BLE001 - they are run again, in the end one by one, and the culprit's caller hears of it
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
            link = self._open()
            if not self._watchers:
                self._seen_version = link.data_version()
            self._watchers.append(watcher)
        except Exception:  # noqa: BLE001 - the one who waits meets it at its next verb
            self._let_go()
            answer([watcher])

    def _poll(self) -> None:
        """Wake the watchers when another connection has committed since the last look. At most once in POLL_EVERY."""
        now = time.monotonic()
        self._watchers = [watcher for watcher in self._watchers if not watcher.left]
        if now < self._poll_at or not self._watchers:
            return
        self._poll_at = now + POLL_EVERY * 0.9
        try:
            seen, self._seen_version = self._seen_version, self._open().data_version()
            changed = seen != self._seen_version
        except Exception:  # noqa: BLE001 - as above
            self._let_go()
            changed = True
        if changed:
            self._wake_watchers()

    def _wake_watchers(self) -> None:
        watchers, self._watchers = self._watchers, []
        if watchers:
            answer(watchers)

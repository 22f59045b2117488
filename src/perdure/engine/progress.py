"""The progress of a run: the last value that its code has set, written to the store a few times a second at most.

It is shown and not recorded: nothing that a body gets depends on it. So a value that is replaced before it is written is skipped,
and a write that fails is tried again later and does not disturb the run. The last value is written before the lease is given up.
While a run is replayed its body sets old values again; none of them is written, and after the replay only what is new.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from typing import Final

from perdure.errors import LeaseLost, ValueNotStorable
from perdure.model.logs import log, run_fields
from perdure.model.records import Lease, RunRow
from perdure.store import StreamStore

# How long a value waits for newer ones: code sets several in a row, and a resumed body first sets those that it had set before.
_FIRST_SECONDS: Final = 0.05
# The shortest time between two writes.
WRITE_SECONDS: Final = 0.25
_RETRY_SECONDS: Final = 1.0


class ProgressReporter:
    """Writes the progress of one drive, under its lease. Not thread-safe: it belongs to the event loop of the drive."""

    def __init__(self, store: StreamStore, lease: Lease, run: RunRow, is_replaying: Callable[[], bool]) -> None:
        self._store = store
        self._lease = lease
        self._run = run
        self._is_replaying = is_replaying
        self._loop = asyncio.get_running_loop()
        self._value = self._written = run.progress
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None
        self._not_before = 0.0
        self._is_stopped = False

    def set(self, value: bytes) -> None:
        """This is the progress from now on."""
        self._value = value
        self._set_timer()

    async def flush(self) -> None:
        """Return when the store has the last value, or has refused it."""
        self._cancel_timer()
        await self.wait()
        if (value := self._unwritten()) is not None:
            self._start_write(value)
            await self.wait()

    def stop(self) -> None:
        """Write nothing more."""
        self._is_stopped = True
        self._cancel_timer()

    async def wait(self) -> None:
        """Return when the write in flight has its reply."""
        if self._writing is not None:
            await asyncio.wait([self._writing])

    def _unwritten(self) -> bytes | None:
        """The value, unless the store has it."""
        return None if self._is_stopped or self._value == self._written else self._value

    def _set_timer(self) -> None:
        if self._timer is None and self._writing is None and self._unwritten() is not None:
            delay = max(_FIRST_SECONDS, self._not_before - self._loop.time())
            # Not the context of a body or of a step: the tasks that are created there are theirs.
            self._timer = self._loop.call_later(delay, self._time_is_up, context=contextvars.Context())

    def _time_is_up(self) -> None:
        self._timer = None
        if self._is_replaying():
            self._not_before = self._loop.time() + WRITE_SECONDS
            self._set_timer()
        elif (value := self._unwritten()) is not None:
            self._start_write(value)

    def _start_write(self, value: bytes) -> None:
        self._not_before = self._loop.time() + WRITE_SECONDS
        self._writing = self._loop.create_task(self._write(value), context=contextvars.Context())

    async def _write(self, value: bytes) -> None:
        try:
            await self._store.report(self._lease, value)
        except LeaseLost:  # the drive learns of it by its own writes
            self._is_stopped = True
        except ValueNotStorable as refusal:
            self._written = value  # it would be refused again
            log.warning("the progress of run %r is not shown: %s", self._run.id, refusal, extra=run_fields(self._run))
        except Exception:  # noqa: BLE001 - whatever a failing store raises: the run goes on, and its own writes report it
            self._not_before = self._loop.time() + _RETRY_SECONDS
        else:
            self._written = value
        finally:
            self._writing = None
            self._set_timer()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

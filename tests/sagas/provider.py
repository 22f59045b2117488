"""A payment provider that knows idempotency keys, and the book of everything it was asked.

A second charge under a key gives the first one and charges nothing. A second refund under a key refunds nothing. The book may be
a file, which every process appends to under a lock: what is in it survives a kill.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request, as the provider has it in its book. `thing` is what is paid for, whatever it is called in the code.

    - `called`, `undoing`: a function of the program began, before it asked for anything.
    - `charge`: under `key`, in the step `step` of `run`; `asked` says that the step had a compensation.
    - `got`: the body has the result of the charge under `key`, so it is recorded.
    - `child`: the body calls a child; `asked` says that it has a compensation.
    - `refund`: of the charge under `of`, which was `found` or not; `in_doubt` says that nobody knows whether there was one.
    """

    kind: Literal["called", "undoing", "charge", "got", "refund", "child"]
    thing: str
    run: str
    key: str = ""
    step: str = ""
    of: str = ""
    asked: bool = False
    found: bool = False
    in_doubt: bool = False


class Provider:
    """The provider, with its book in memory or in a file."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._read = 0
        # Plain steps ask in threads.
        self._lock = threading.RLock()
        self.book: list[Event] = []
        self.on_event: Callable[[Event], None] | None = None
        self._charges: dict[str, Event] = {}
        self._noted = set[Event]()
        self._calls = Counter[tuple[str, str]]()

    def begin(self, event: Event) -> int:
        """Note that a function was called, and say how often it was before."""
        with self._turn():
            before = self._calls[event.kind, event.thing]
            self._write(event)
        return before

    def charge(self, event: Event) -> None:
        """Charge, unless it is known under its key."""
        with self._turn():
            self._write(event)

    def note(self, event: Event) -> None:
        """Note what a body does or has: once, since it does so again on every replay."""
        with self._turn():
            if event not in self._noted:
                self._write(event)

    def refund(self, event: Event) -> bool:
        """Refund the charge under `of`, unless that was done under this key. Whether there is such a charge."""
        with self._turn():
            found = event.of in self._charges
            self._write(msgspec.structs.replace(event, found=found))
        return found

    def read(self) -> list[Event]:
        """The book, as it stands."""
        with self._turn():
            return list(self.book)

    def _write(self, event: Event) -> None:
        self._take(event)
        if self.on_event is not None:
            self.on_event(event)
        if self._path is not None:
            line = msgspec.json.encode(event) + b"\n"
            os.write(self._file, line)
            self._read += len(line)

    def _take(self, event: Event) -> None:
        self.book.append(event)
        self._calls[event.kind, event.thing] += 1
        if event.kind in ("got", "child"):
            self._noted.add(event)
        if event.kind == "charge":
            self._charges.setdefault(event.key, event)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Nobody else writes meanwhile, and everything that was written is known. A line is whole, or was cut off by a kill."""
        with self._lock:
            if self._path is None:
                yield
            else:
                with self._file_turn(self._path):
                    yield

    @contextmanager
    def _file_turn(self, path: Path) -> Iterator[None]:
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            new = os.pread(self._file, 1 << 26, self._read)
            self._read += len(new)
            for line in new.splitlines():
                self._take(msgspec.json.decode(line, type=Event))
            yield
        finally:
            os.close(self._file)

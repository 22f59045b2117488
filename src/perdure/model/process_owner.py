"""The process that holds a lease or runs a worker, named so that others on the same machine can find out that it has ended.

An owner is `host/boot/namespaces/pid/start`. A process can be looked up only from the same host, boot and PID namespace (and
time namespace: start times are shown shifted by it). A process that cannot be looked up counts as alive, and only expiry ends its
lease: a live process must never be taken for a dead one.

A store that only one process may use names its process in the same way, and refuses a second one; the registry of workers shows
one whose process has ended as gone.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote

_PROC: Final = "/proc"
UNKNOWN: Final = "-"
_CACHED_FOR: Final = 0.2
_MAX_CACHED: Final = 1000
# How many microseconds after a claim the next one has to look whether a process that holds leases has ended.
_LOOK_AGAIN_AFTER: Final = 1_000_000


class Owner(NamedTuple):
    """The identity of a process; parts that the system does not tell are `-`."""

    host: str
    boot: str
    namespaces: str
    pid: int
    start: str

    def __str__(self) -> str:
        return "/".join(map(str, self))

    @classmethod
    def parse(cls, text: str) -> Owner | None:
        """The owner that a lease names, or None when the text is not one of ours."""
        parts = text.split("/")
        if len(parts) != len(cls._fields) or not parts[3].isdecimal():
            return None
        return cls(parts[0], parts[1], parts[2], int(parts[3]), parts[4])

    @property
    def label(self) -> str:
        """How an error message names it."""
        return f"process {self.pid} on host {self.host}"


def label_of(owner: str | None) -> str:
    """Return how an error message names the holder of a lease."""
    if not owner:
        return "a live worker"
    known = Owner.parse(owner)
    if known is not None:
        return known.label
    host, _, pid = owner.rpartition("/")  # which is how a store on a server names its processes
    return f"process {pid} on host {host}" if host and pid.isdecimal() else owner


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _host() -> str:
    return quote(_read("/etc/machine-id") or socket.gethostname(), safe="") or UNKNOWN


def _namespaces() -> str:
    try:
        pid = str(Path(_PROC, "self/ns/pid").readlink())
    except OSError:
        return UNKNOWN
    try:
        clock = str(Path(_PROC, "self/ns/time").readlink())
    except OSError:
        clock = ""  # kernels before 5.6 have no time namespaces
    return quote(pid + clock, safe=":[]")


class _Stat(NamedTuple):
    pid: int
    state: str
    threads: int
    start: str


def _stat(pid: int | str) -> _Stat | None:
    """What /proc says about a process. The command's name may contain anything, so fields are counted from its end."""
    text = _read(f"{_PROC}/{pid}/stat")
    fields = text[text.rfind(")") + 1 :].split()
    if len(fields) < 20:
        return None
    return _Stat(int(text.split(" ", 1)[0]), fields[0], int(fields[17]), fields[19])


def current() -> Owner:
    """Return this process. It reads a few small files, all but one of them made by the kernel as they are read."""
    here = _stat("self")
    if here is None or here.pid != os.getpid():  # no /proc, or that of another PID namespace
        return Owner(_host(), UNKNOWN, UNKNOWN, os.getpid(), UNKNOWN)
    boot = _read(f"{_PROC}/sys/kernel/random/boot_id") or UNKNOWN
    return Owner(_host(), boot, _namespaces(), here.pid, here.start)


class Owners:
    """The owner text of this process, and which other owners have ended. Any thread may ask."""

    def __init__(self) -> None:
        self._here: Owner | None = None
        self._text = ""
        self._alive_until: dict[str, float] = {}

    def next_look_at(self, next_wake_at: int | None, holders: Iterable[str | None], at: int) -> int | None:
        """When to claim again: at `next_wake_at`, or soon while another process holds a lease: nothing reports its end."""
        if all(holder is None or holder == self.here for holder in holders):
            return next_wake_at
        soon = at + _LOOK_AGAIN_AFTER
        return soon if next_wake_at is None else min(soon, next_wake_at)

    @property
    def here(self) -> str:
        """The text that this process writes into its leases; a forked child has another than its parent."""
        if self._here is None or self._here.pid != os.getpid():
            self._here = current()
            self._text = str(self._here)
        return self._text

    def has_ended(self, text: str) -> bool:
        """Whether the process has certainly ended. That it lives is cached for a moment."""
        if text == self.here or self._alive_until.get(text, 0.0) > time.monotonic():
            return False
        if self._has_certainly_ended(Owner.parse(text)):
            return True
        if len(self._alive_until) > _MAX_CACHED:
            self._alive_until.clear()
        self._alive_until[text] = time.monotonic() + _CACHED_FOR
        return False

    def _has_certainly_ended(self, owner: Owner | None) -> bool:
        here = self._here
        if owner is None or here is None or UNKNOWN in (owner.boot, here.boot) or owner.host != here.host:
            return False
        if owner.boot != here.boot:
            return True
        if owner.namespaces != here.namespaces or UNKNOWN in (owner.namespaces, owner.start):
            return False
        return _process_has_ended(owner)


def _process_has_ended(owner: Owner) -> bool:
    stat = _stat(owner.pid)
    if stat is None:  # it has ended, or is hidden from us (hidepid): only a hidden one exists
        return not _exists(owner.pid)
    # A zombie has no other threads; a process of which only the first thread has ended shows Z too, but counts the others.
    return stat.start != owner.start or (stat.state in "ZX" and stat.threads <= 1)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True

"""Locks between processes and threads: `flock` on a file, held for the length of a block.

Every lock is a descriptor of its own, so threads of one process exclude each other as processes do, and the kernel releases the
lock when the process dies. A forked child would keep its parent's locks alive through the descriptors it inherits, so it closes
them.
"""

# Paths are the strings that the kernel takes.
# ruff: noqa: PTH116

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from perdure.errors import PersistenceError, StoreCapabilityError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

PATIENCE: Final = 15.0
_FIRST_PAUSE: Final = 0.0002
_LONGEST_PAUSE: Final = 0.005

# The descriptors of locks that this process has or waits for.
_open: Final[set[int]] = set()
# Held over a fork, so that no descriptor is opened unnoticed.
_guard: Final = threading.Lock()


def check_locks() -> None:
    """Raise `StoreCapabilityError` where there is no flock."""
    if fcntl is None:
        raise StoreCapabilityError("files key-value", "file locks on this system")


class LockBusy(Exception):
    """Another thread or process has the lock."""


@contextmanager
def file_lock(path: str, *, create: bool = False) -> Iterator[bool]:
    """Hold the lock on the file at `path`; False, and no lock, if there is no such file.

    A file that was moved away meanwhile is no longer the one to lock. Raises `LockBusy` if the lock is not free in time.
    """
    fd = _acquire(path, create=create, deadline=time.monotonic() + PATIENCE)
    try:
        yield fd is not None
    finally:
        if fd is not None:
            _release(fd)


def _acquire(path: str, *, create: bool, deadline: float) -> int | None:
    while True:
        try:
            fd = _open_lock(path, os.O_RDWR | (os.O_CREAT if create else 0))
        except (FileNotFoundError, NotADirectoryError):
            if create:
                raise
            return None
        try:
            _wait(fd, deadline)
            if _is_at(fd, path):
                return fd
        except BaseException:
            _release(fd)
            raise
        _release(fd)


def _open_lock(path: str, flags: int) -> int:
    with _guard:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        _open.add(fd)
        return fd


def _release(fd: int) -> None:
    with _guard:
        _open.discard(fd)
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)  # a child that inherited the descriptor a moment ago must not prolong the lock
        os.close(fd)


def _wait(fd: int, deadline: float) -> None:
    """Poll rather than wait in the kernel: a process that is stopped with the lock must not block the others forever."""
    pause = _FIRST_PAUSE
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise LockBusy from None
        else:
            return
        time.sleep(pause)
        pause = min(pause * 2, _LONGEST_PAUSE)


def _is_at(fd: int, path: str) -> bool:
    try:
        there = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    here = os.fstat(fd)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def lock_timeout(path: str) -> PersistenceError:
    """Return the error for a caller that did not get the lock in time."""
    return PersistenceError(
        f"key-value files {path!r}",
        f"another process kept a lock for more than {PATIENCE:g} s; is it stopped in the middle of a write?",
    )


def _after_fork_in_child() -> None:
    for fd in _open:
        with suppress(OSError):
            os.close(fd)
    _open.clear()
    _guard.release()  # the forking thread took it, and that thread is this one


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_guard.acquire,
        after_in_parent=_guard.release,
        after_in_child=_after_fork_in_child,
    )

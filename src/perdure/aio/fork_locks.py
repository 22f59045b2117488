"""Locks that are held over a fork.

A forked child has one thread, and inherits every lock as it is: one that another thread of the parent held is never released in
the child, and what it guards may be changed half way. Before a fork the forking thread takes the locks made here, so both sides
find them free and what they guard whole.

Only for locks under which nothing waits and no other of these is taken: the fork waits for each of them in turn.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Final

# Guards the set, which must not change while it is gone through.
_guard: Final = threading.Lock()
_locks: Final[weakref.WeakSet[threading.Lock]] = weakref.WeakSet()
# Those that the forking thread holds, during a fork.
_held: Final[list[threading.Lock]] = []


def new_fork_lock() -> threading.Lock:
    """A lock that no thread but the forking one holds during a fork."""
    lock = threading.Lock()
    with _guard:
        _locks.add(lock)
    return lock


def _before_fork() -> None:
    _guard.acquire()
    _held.append(_guard)
    for lock in list(_locks):
        lock.acquire()
        _held.append(lock)


def _after_fork() -> None:
    while _held:
        _held.pop().release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)

"""The places of this process: one for each directory and namespace, shared by the stores on it, and safe over a fork."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Final

from perdure.backends.base.lifecycle import Lifecycle
from perdure.backends.files.lanes import Lanes
from perdure.backends.files.place import Place


class SharedPlace:
    """A place with its threads and the gates of the stores that use it."""

    def __init__(self, root: str, prefix: str) -> None:
        self.place = Place(root, prefix)
        self.gates: weakref.WeakSet[Lifecycle] = weakref.WeakSet()
        self.users = 0
        # Weakly: the threads must not keep the place alive when its last store was dropped.
        here = weakref.ref(self)
        self.lanes = Lanes(self.place, lambda: _wake(here()))

    def wake(self) -> None:
        """Wake everybody in this process who watches."""
        for lifecycle in list(self.gates):
            lifecycle.wake()

    def start_over(self) -> None:
        """In a forked child: nothing is under way."""
        self.place.start_over()
        self.lanes.start_over()


def _wake(shared: SharedPlace | None) -> None:
    if shared is not None:
        shared.wake()


_places: Final[weakref.WeakValueDictionary[tuple[str, str], SharedPlace]] = weakref.WeakValueDictionary()
# Guards the table and `users`; held over a fork.
_lock: Final = threading.Lock()


def place_at(root: str, prefix: str, lifecycle: Lifecycle) -> SharedPlace:
    """The place of this directory and namespace, with one user more."""
    with _lock:
        shared = _places.get((root, prefix))
        if shared is None:
            shared = _places[root, prefix] = SharedPlace(root, prefix)
        shared.users += 1
        shared.gates.add(lifecycle)
        return shared


def leave(shared: SharedPlace, lifecycle: Lifecycle) -> bool:
    """One user less. True for the last one, who must then stop the threads."""
    with _lock:
        shared.users -= 1
        shared.gates.discard(lifecycle)
        if shared.users:
            return False
        _places.pop((shared.place.root, shared.place.prefix), None)
        return True


def _after_fork_in_child() -> None:
    for shared in list(_places.values()):
        shared.start_over()
    _lock.release()  # the forking thread took it, and that thread is this one


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_lock.acquire,
        after_in_parent=_lock.release,
        after_in_child=_after_fork_in_child,
    )

"""What a crash left undone: runs that the index does not know, parents that were not notified, runs that a schedule fired.

Every verb that looks for runs repairs first, so no process has to be started for it.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from perdure.backends.base.leases import store_time
from perdure.backends.files.locks import LockBusy
from perdure.backends.files.namespace import FilesNamespace
from perdure.backends.files.schedules import create_fired, read_settings
from perdure.backends.files.verbs import keep_debt
from perdure.errors import SnapshotCorrupt

# How many seconds `claim` and the like wait for the lock of a run that they pass over otherwise.
PASS_OVER_AFTER: Final = 1.0
# How many seconds `claim`, `list` and the like wait for the writer of a run of which the index knows nothing yet.
_WAIT_FOR_WRITERS: Final = 1.0


def repair(namespace: FilesNamespace) -> None:
    """Bring the index up to date, and finish what a crash left undone."""
    update_index(namespace)
    indebted = [summary.id for summary in namespace.index.unfinished() if summary.owes_parent]
    for run_id in indebted:
        with suppress(SnapshotCorrupt, LockBusy):  # the parent is notified later; other runs must not wait for that
            namespace.change_and_notify(run_id, keep_debt, store_time(None), patience=PASS_OVER_AFTER)
    if read_settings(namespace).fired:
        with namespace.lock("settings"):
            create_fired(namespace)
        namespace.wake()
    elif not indebted:
        return
    update_index(namespace)


def update_index(namespace: FilesNamespace) -> None:
    """Read what was added to the index, and the logs of runs that stayed dirty in it."""
    index = namespace.index
    index.refresh()
    if dirty := index.dirty_runs():
        for name, may_wait in dirty:
            _index_dirty(namespace, name, patience=_WAIT_FOR_WRITERS if may_wait else 0.0)
        index.refresh()


def _index_dirty(namespace: FilesNamespace, name: str, *, patience: float) -> None:
    """Sum up a dirty run from its log. One that is being written at this moment stays as the index knows it."""
    try:
        namespace.index_from_log(name, patience=patience)
    except SnapshotCorrupt:
        pass  # `get` and the like raise this for the run; here it must not keep the other runs from being driven
    except LockBusy:
        if patience:
            namespace.index.mark_stuck(name)

"""What a crash may have left undone, done by whoever looks for runs next."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from perdure.backends.files.locks import Busy
from perdure.backends.files.place import Place
from perdure.backends.files.schedules import create_fired
from perdure.backends.files.verbs import clock, remember_debt
from perdure.errors import SnapshotCorrupt

# How many seconds anybody waits for a run's lock on behalf of somebody else.
PASS_OVER_AFTER: Final = 1.0


def look_around(place: Place) -> None:
    """Have the index know all that was acknowledged, and what a crash left undone done."""
    place.look_around()
    indebted = [summary.id for _, summary in place.index.living() if summary.owes_parent]
    for run_id in indebted:
        with suppress(SnapshotCorrupt, Busy):  # the debt stays, and must not keep the others from being driven
            place.tell(run_id, remember_debt, clock(None), patience=PASS_OVER_AFTER)
    if place.settings.read().fired:
        with place.lock("settings"):
            create_fired(place)
        place.wake()
    elif not indebted:
        return
    place.look_around()

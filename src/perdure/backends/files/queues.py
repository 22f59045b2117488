"""Queues with limits: their limits, when their runs last started, and leases of single runs, which keep to them.

The limits are in the file of the settings. The last start of each queue with a rate is in a file of its own, which is written
under the lock of claims and before the lease: a crash in between delays the next start, and never lets two runs start together.

`create` and `acquire` hold the lock of limits, shared, until their run is on disk: once `limit_queue` has returned, no lease
appears that was given without the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

import msgspec

from perdure.backends.base.claim_rules import QueueCounter
from perdure.backends.base.leases import is_leased, store_time
from perdure.backends.base.process_owner import Owners
from perdure.backends.files import verbs
from perdure.backends.files.index import RunSummary
from perdure.backends.files.index_repair import repair
from perdure.backends.files.namespace import FilesNamespace
from perdure.backends.files.schedules import read_checked, read_settings, write_checked, write_settings
from perdure.backends.files.verbs import has_dead_owner
from perdure.model.records import Claim, Created, NewRun, QueueLimits, RunRow

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(dict[str, int])


def limit_queue(namespace: FilesNamespace, queue: str, limits: QueueLimits) -> None:
    """Replace the limits of a queue. The same limits again change nothing and take no lock."""
    if read_settings(namespace).limits.get(queue, QueueLimits()) == limits:
        return
    with namespace.lock("limits"), namespace.lock("claim"), namespace.lock("settings"):
        settings = read_settings(namespace)
        if limits.is_limited:
            settings.limits[queue] = limits
        else:
            settings.limits.pop(queue, None)
        write_settings(namespace, settings)


def queue_limits(namespace: FilesNamespace) -> dict[str, QueueLimits]:
    """The limits that were set, by queue."""
    return read_settings(namespace).limits


def queue_counter(namespace: FilesNamespace, owners: Owners, at: int) -> QueueCounter:
    """How many more runs the queue limits let in. The caller has the lock of claims, and has repaired the index."""
    limits = queue_limits(namespace)
    leased = [one for one in namespace.index.unfinished() if _is_taken(one, owners, at)] if limits else []
    last_starts = _read_starts(namespace) if any(one.interval is not None for one in limits.values()) else {}
    return QueueCounter(limits, ((one.queue, one.limit_key, 1) for one in leased), last_starts=last_starts, now=at)


def save_starts(namespace: FilesNamespace, queues: Iterable[str], at: int) -> None:
    """Note that a run starts now in each of these queues. The caller has the lock of claims."""
    starts = dict.fromkeys(queues, at)
    if starts:
        write_checked(_starts_path(namespace), _encoder.encode(_read_starts(namespace) | starts))


def _read_starts(namespace: FilesNamespace) -> dict[str, int]:
    body = read_checked(namespace, _starts_path(namespace))
    return {} if body is None else _decoder.decode(body)


def _starts_path(namespace: FilesNamespace) -> str:
    return f"{namespace.directory}/starts"


def _is_taken(summary: RunSummary, owners: Owners, at: int) -> bool:
    return is_leased(summary, at) and not has_dead_owner(summary.lease_owner, owners)


def create_leased(namespace: FilesNamespace, run: NewRun, create: Callable[..., Created], ttl: float) -> Created:
    """Create the run, or find it; a new one is leased if its queue has no limits."""
    with namespace.lock("limits", shared=True):
        is_limited = run.queue in queue_limits(namespace)
        return namespace.change_one(run.id, partial(create, ttl=None if is_limited else ttl), create=True)


def acquire(
    namespace: FilesNamespace, run_id: str, ttl: float, owners: Owners, now: int | None, *, due_only: bool
) -> Claim | None:
    """Lease this run, if its queue has room."""
    with namespace.lock("limits", shared=True):
        if namespace.read(run_id, lambda state: state.row.queue) not in queue_limits(namespace):
            lease = partial(verbs.acquire, ttl=ttl, owners=owners, at=store_time(now), due_only=due_only)
            return namespace.change_one(run_id, lease)
        with namespace.lock("claim"):
            repair(namespace)
            at = store_time(now)
            counter = queue_counter(namespace, owners, at)

            def take_room(row: RunRow) -> bool:
                has_room = counter.take(row.queue, row.limit_key, is_start=not row.has_started)
                save_starts(namespace, counter.started, at)
                return has_room

            lease = partial(verbs.acquire, ttl=ttl, owners=owners, at=at, due_only=due_only, take_room=take_room)
            return namespace.change_one(run_id, lease)

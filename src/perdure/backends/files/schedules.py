"""Schedules, queue limits and workers of a namespace: one small file, replaced as a whole.

A schedule that fires moves on and leaves the run that it starts in the same file; only then is the run created. A process that
finds a run there creates it first, so a crash in between neither loses the run nor starts it twice. The file is read without a
lock and changed under that of the settings.
"""

from __future__ import annotations

import os
import zlib
from contextlib import suppress
from functools import partial
from typing import Final

import msgspec

from perdure.backends.base.leases import store_time
from perdure.backends.base.new_runs import new_row
from perdure.backends.files.disk import open_file, read_all, replace_file
from perdure.backends.files.namespace import FilesNamespace
from perdure.backends.files.verbs import create_missing
from perdure.errors import PersistenceError, SnapshotCorrupt
from perdure.model.records import NewRun, QueueLimits, RunRow, Schedule, WorkerRow

_MARK: Final = b"perdure settings 1\n"


class FilesSettings(msgspec.Struct, omit_defaults=True):
    """The content of the file. `fired` are runs that were started by a schedule and may not exist yet."""

    schedules: dict[str, Schedule] = {}
    limits: dict[str, QueueLimits] = {}
    fired: list[RunRow] = []
    workers: dict[str, WorkerRow] = {}


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(FilesSettings)


def read_settings(namespace: FilesNamespace) -> FilesSettings:
    """The schedules and queue limits as they are now."""
    body = read_checked(namespace, _path(namespace))
    return FilesSettings() if body is None else _decoder.decode(body)


def read_checked(namespace: FilesNamespace, path: str) -> bytes | None:
    """The content of a small file of the namespace, or None when there is none. Raises `PersistenceError` when it is damaged."""
    try:
        with open_file(path, os.O_RDONLY) as fd:
            data = read_all(fd, 0)
    except FileNotFoundError:
        namespace.check_directory()
        return None
    start = len(_MARK) + 4
    if data[: len(_MARK)] != _MARK or zlib.crc32(data[start:]).to_bytes(4, "little") != data[len(_MARK) : start]:
        raise PersistenceError(f"files store {path!r}", "the file is damaged; keep it, and restore it from a backup")
    return data[start:]


def write_checked(path: str, body: bytes) -> None:
    """Replace a small file of the namespace as a whole."""
    replace_file(path, _MARK + zlib.crc32(body).to_bytes(4, "little") + body)


def write_settings(namespace: FilesNamespace, settings: FilesSettings) -> None:
    """Replace the file. The caller has the lock of the settings."""
    write_checked(_path(namespace), _encoder.encode(settings))


def _path(namespace: FilesNamespace) -> str:
    return f"{namespace.directory}/settings"


def put_schedule(namespace: FilesNamespace, schedule: Schedule) -> None:
    """Insert or replace the schedule."""
    with namespace.lock("settings"):
        settings = read_settings(namespace)
        settings.schedules[schedule.id] = schedule
        write_settings(namespace, settings)


def list_schedules(namespace: FilesNamespace) -> list[Schedule]:
    """All schedules, by id."""
    return [schedule for _, schedule in sorted(read_settings(namespace).schedules.items())]


def drop_schedule(namespace: FilesNamespace, schedule_id: str) -> bool:
    """Remove the schedule."""
    with namespace.lock("settings"):
        settings = read_settings(namespace)
        if settings.schedules.pop(schedule_id, None) is None:
            return False
        write_settings(namespace, settings)
        return True


def fire(
    namespace: FilesNamespace, schedule_id: str, expected_at: int, next_at: int | None, run: NewRun | None, now: int | None
) -> bool:
    """Move the schedule on and create its run, once."""
    with namespace.lock("settings"):
        settings = read_settings(namespace)
        schedule = settings.schedules.get(schedule_id)
        if schedule is None or schedule.next_at != expected_at:
            return False
        settings.schedules[schedule_id] = msgspec.structs.replace(schedule, next_at=next_at)
        if run is not None:
            settings.fired.append(new_row(run, store_time(now)))
        write_settings(namespace, settings)
        create_fired(namespace)
        return True


def create_fired(namespace: FilesNamespace) -> None:
    """Create the runs that schedules have started. The caller has the lock of the settings."""
    settings = read_settings(namespace)
    for row in settings.fired:
        with suppress(SnapshotCorrupt):  # there is a run with this id, and it is left as it is
            namespace.change_one(row.id, partial(create_missing, row=row), create=True)
    settings.fired = []
    write_settings(namespace, settings)


def put_worker(namespace: FilesNamespace, worker_id: str, info: bytes, now: int | None) -> None:
    """Insert or replace the worker, seen now."""
    with namespace.lock("settings"):
        settings = read_settings(namespace)
        settings.workers[worker_id] = WorkerRow(id=worker_id, seen_at=store_time(now), info=info)
        write_settings(namespace, settings)


def list_workers(namespace: FilesNamespace) -> list[WorkerRow]:
    """All workers, by id."""
    return [worker for _, worker in sorted(read_settings(namespace).workers.items())]


def drop_worker(namespace: FilesNamespace, worker_id: str) -> None:
    """Remove the worker, if it is there."""
    with namespace.lock("settings"):
        settings = read_settings(namespace)
        if settings.workers.pop(worker_id, None) is not None:
            write_settings(namespace, settings)

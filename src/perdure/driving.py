"""Drives under way in this process, known by database and run id, so that two calls for one run join one drive."""

from __future__ import annotations

import asyncio
from typing import Any, TypeAlias

from perdure.engine import Drive
from perdure.result import Outcome
from perdure.store import Store

DriveKey: TypeAlias = tuple[int, tuple[str, ...], str]


class Driving:
    """A drive under way and how many wait for it. `is_background`: it goes on when nobody does."""

    def __init__(self, drive: Drive, *, is_background: bool) -> None:
        self.drive = drive
        self.is_background = is_background
        self._waiting = 0
        self.task = asyncio.get_running_loop().create_task(drive.drive(), name=f"perdure-drive:{drive.run.id}")

    async def joined(self) -> Outcome[Any]:
        """What the drive comes to. Cancelling the last of those who wait for it stops the drive, and waits until it has."""
        self._waiting += 1
        try:
            return await asyncio.shield(self.task)
        except asyncio.CancelledError:
            if self._waiting == 1 and not self.is_background and not self.task.done():
                self.task.cancel()
                await asyncio.wait([self.task])
            raise
        finally:
            self._waiting -= 1


_driving: dict[DriveKey, Driving] = {}


def drive_key(store: Store, run_id: str) -> DriveKey:
    """How a drive is known: by event loop, database and run id."""
    return id(asyncio.get_running_loop()), store.key, run_id


def joinable(store: Store, run_id: str) -> Driving | None:
    """The drive of this run, if one is under way on this loop."""
    return _driving.get(drive_key(store, run_id))


def announce(key: DriveKey, driving: Driving) -> None:
    """Let others join this drive until it has ended."""
    _driving[key] = driving
    driving.task.add_done_callback(lambda _: _driving.pop(key) if _driving.get(key) is driving else None)

"""The worker processes of random sagas: each drives the runs of many programs, in the versions of the code that it is given."""

from __future__ import annotations

import asyncio
import logging
import time
import warnings
from pathlib import Path
from typing import Final, NamedTuple

from perdure import Runtime
from tests.backends.opening import store_at
from tests.backends.processes import ParentPipe
from tests.sagas.bodies import flows_of, some_pause
from tests.sagas.programs import Version
from tests.sagas.provider import Provider

# How long a second of a program takes here.
PACE: Final = 0.02


class RealProcess:
    """This process, for one program. When it dies nothing has to be said."""

    pace = PACE

    def __init__(self, provider: Provider, seed: int) -> None:
        self.provider = provider
        self.prefix = prefix_of(seed)
        self._seed = seed

    def check(self) -> None:
        """It lives."""

    async def dawdle(self, what: str) -> None:
        await asyncio.sleep(some_pause(what, self._seed) * PACE)

    def linger(self, seconds: float) -> None:
        time.sleep(seconds * PACE)


class Deployed(NamedTuple):
    """The code of one program: all versions that it has had, and which it has now."""

    seed: int
    versions: list[Version]
    current: int


def prefix_of(seed: int) -> str:
    """How the ids of a program's runs begin, and the names of its workflows."""
    return f"{seed}:"


async def drive_sagas(
    parent: ParentPipe, dsn: str, book: Path, deployed: list[Deployed], lease_ttl: float, attempts: int
) -> None:
    """Drive the runs of these programs until killed, or told to stop."""
    logging.disable()  # most of what these programs do deserves a warning
    warnings.simplefilter("ignore")
    asyncio.get_running_loop().set_exception_handler(lambda _, __: None)
    provider = Provider(book)
    flows = [flow for each in deployed for flow in flows_of(RealProcess(provider, each.seed), each.versions, each.current)]
    async with store_at(dsn) as store:
        async with Runtime(store, flows, concurrency=50, lease_ttl=lease_ttl, unload_grace=0.1, max_attempts=attempts):
            parent.send("ready")
            await parent.receive()
        parent.send("stopped")

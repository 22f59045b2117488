"""A run that ends its worker's process is set aside, and the runs beside it are not."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Final

from perdure import Runtime
from tests.backends import jobs
from tests.backends.conftest import Start
from tests.backends.opening import store_at
from tests.backends.registry import POSTGRES, REDIS, SQLITE, Backend, on

HEALTHY: Final = 20
MAX_ATTEMPTS: Final = 4


@on(SQLITE, POSTGRES, REDIS)
def test_only_the_run_that_ends_its_workers_is_set_aside(backend: Backend, dsn: str, start: Start) -> None:
    async def begin() -> None:
        async with store_at(dsn) as store:
            client = Runtime(store, workflows=[jobs.endangered], concurrency=0)
            for n in range(HEALTHY):
                await client.start(jobs.endangered, False, id=f"healthy-{n}")
                if n == HEALTHY // 2:
                    await client.start(jobs.endangered, True, id="culprit")

    async def look() -> tuple[Counter[str], str]:
        async with store_at(dsn) as store:
            lines = await store.list()
            culprit = await store.get("culprit")
            assert culprit is not None
            return Counter(line.status for line in lines if line.id != "culprit"), f"{culprit.status}: {culprit.outcome!r}"

    asyncio.run(begin())
    starts = 0
    has_ended = False
    while not has_ended and starts < 3 * MAX_ATTEMPTS:
        starts += 1
        has_ended = start(jobs.endangered_worker, dsn, backend.lease_ttl, MAX_ATTEMPTS).exit_code() == 0
    statuses, culprit = asyncio.run(look())
    assert statuses == {"completed": HEALTHY}
    assert culprit.startswith("dead: ")
    assert f"its worker was lost {MAX_ATTEMPTS} times" in culprit
    assert starts == MAX_ATTEMPTS + 1

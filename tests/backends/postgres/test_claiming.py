"""What becomes of a claim when a run that it is about to take changes in the middle of its statement."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg  # type: ignore[import-untyped]  # it ships no types

from perdure.backends.postgres import PostgresStore
from perdure.testing.contract.world import TTL, new_run
from tests.backends.postgres.conftest import run
from tests.patience import PATIENCE

# Reads the clock when nobody has the lock, in the place of PostgreSQL's own function.
SLOW_CLOCK = """
    CREATE FUNCTION clock_timestamp() RETURNS timestamptz LANGUAGE plpgsql VOLATILE AS $$
    BEGIN
        PERFORM pg_advisory_xact_lock_shared(hashtext(current_schema()));
        RETURN pg_catalog.clock_timestamp();
    END $$
"""
WAITING = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND objid = hashtext(current_schema())::oid"


@asynccontextmanager
async def clock_stopped(dsn: str) -> AsyncIterator[Any]:
    """Let no statement read the slow clock until this is left. Give the connection that has the lock."""
    connection = await asyncpg.connect(dsn)
    await connection.execute("SELECT pg_advisory_lock(hashtext(current_schema()))")
    try:
        yield connection
    finally:
        await connection.close()


async def test_a_run_that_is_put_on_hold_while_a_claim_looks_keeps_no_other_from_being_claimed(dsn: str) -> None:
    """Nothing would say to the worker that another run is due, and it would ask again when it has to."""
    other, store = PostgresStore(dsn), PostgresStore(f"{dsn},pg_catalog")  # `pg_catalog` would come first if it were not named
    await other.create(new_run("held"))
    await other.create(new_run("next"))
    await run(dsn, SLOW_CLOCK)
    await store.get("held")
    async with asyncio.timeout(PATIENCE):
        async with clock_stopped(dsn) as connection:
            claiming = asyncio.create_task(store.claim(1, TTL, [("flow", 1)]))
            while not await connection.fetchval(WAITING):  # noqa: ASYNC110 - the server says it to nobody
                await asyncio.sleep(0.002)
            await other.hold("held")
        assert [claim.run.id for claim in (await claiming).claims] == ["next"]
    row = await other.get("held")
    assert row is not None
    assert (row.status, row.held) == ("pending", True)
    await store.close()
    await other.close()

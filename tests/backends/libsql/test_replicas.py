"""A server that passes writes on to its primary and reads what has come back: always a little late."""

from collections.abc import Iterator

import pytest

from perdure.backends.libsql import LibsqlStore
from perdure.backends.libsql.address import parse_url
from perdure.backends.libsql.hrana import BatchStep, HranaClient
from perdure.backends.sql.dialect import Statement
from perdure.testing.contract.world import TTL, entry, new_run
from tests.campaign import times
from tests.servers.libsql import LibsqlServer
from tests.servers.process import free_port


@pytest.fixture(scope="module")
def primary_and_replica() -> Iterator[tuple[LibsqlServer, LibsqlServer]]:
    port = free_port()
    primary = LibsqlServer("--grpc-listen-addr", f"127.0.0.1:{port}", own=True)
    primary.start()
    replica = LibsqlServer("--primary-grpc-url", f"http://127.0.0.1:{port}", own=True)
    replica.start()
    yield primary, replica
    replica.remove()
    primary.remove()


async def test_what_was_acknowledged_is_read_also_from_a_replica(primary_and_replica: tuple[LibsqlServer, LibsqlServer]) -> None:
    store = LibsqlStore(primary_and_replica[1].url)
    for n in range(times(500)):
        claim = (await store.create(new_run(f"run-{n}"), ttl=TTL)).claim
        assert claim is not None
        await store.record(claim.lease, [entry(1)])
        assert await store.journal(f"run-{n}") == [entry(1)]
        assert await store.get(f"run-{n}") is not None
    await store.close()


async def test_who_takes_a_run_over_through_a_replica_gets_all_of_its_journal(
    primary_and_replica: tuple[LibsqlServer, LibsqlServer],
) -> None:
    primary, replica = (LibsqlStore(server.url, table="takeover") for server in primary_and_replica)
    await replica.setup()
    for n in range(times(500)):
        claim = (await primary.create(new_run(f"run-{n}"), ttl=TTL)).claim
        assert claim is not None
        await primary.record(claim.lease, [entry(1), entry(2)])
        taken = await replica.acquire(f"run-{n}", TTL, now=claim.lease.until + 1)
        assert taken is not None
        assert taken.journal == [entry(1), entry(2)]
    await primary.close()
    await replica.close()


async def test_a_replica_is_late_without_being_asked_to_wait(primary_and_replica: tuple[LibsqlServer, LibsqlServer]) -> None:
    """So that the two tests above mean something."""
    first, second = (HranaClient(parse_url(server.url).address, None, size=1) for server in primary_and_replica)
    await first.batch([BatchStep(Statement("CREATE TABLE IF NOT EXISTS late (n INTEGER)"))])
    late = 0
    for n in range(200):
        await first.batch([BatchStep(Statement("INSERT INTO late VALUES (?)", (n,)))])
        second.last_change = None
        ends = await second.batch([BatchStep(Statement("SELECT count(*) FROM late"))])
        late += ends.errors[0] is not None or ends.results_or_raise()[0].rows[0][0] != n + 1
    assert late > 0
    await first.close()
    await second.close()

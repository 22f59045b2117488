from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.backends.sql.dialect import MYSQL, POSTGRES, SQLITE, Tables
from perdure.backends.sql.recording import Write, record_statements
from perdure.backends.sql.rows import BYTES, MARK, TEXT
from perdure.model.journal import Entry
from perdure.model.records import Lease
from perdure.testing.contract.world import NOW, TTL, entry, new_run
from tests.backends.sql_client.places import Place

LEASE = Lease(run_id="run", epoch=7, token="token", until=9)


@given(st.binary() | st.text().map(lambda text: text.encode("utf-8", "surrogatepass")) | st.just(MARK.encode()))
def test_every_payload_comes_back_as_it_was(payload: bytes) -> None:
    stored = TEXT.payload(payload)
    assert isinstance(stored, str)
    assert "\0" not in stored
    assert TEXT.payload_from(stored) == TEXT.payload_from(stored.encode()) == payload
    assert BYTES.payload_from(BYTES.payload(payload)) == payload


def test_json_stays_readable() -> None:
    assert TEXT.payload('{"name": "Ærø"}'.encode()) == '{"name": "Ærø"}'


async def test_payloads_of_every_kind_survive_the_database(here: Place) -> None:
    store = here.store()
    payloads = [
        b"",
        b"\0",
        bytes(range(256)),
        MARK.encode(),
        b"base64:AAAA",
        "é\U0001f600\\'\"%s ?1 $1 :x".encode(),
        b"x" * 5_000_000,
    ]
    claim = (await store.create(new_run(input=b"\xff", seed=bytes(16)), ttl=TTL, now=NOW)).claim
    assert claim is not None
    entries = [entry(seq, payload=payload, args_hash=payload[:32]) for seq, payload in enumerate(payloads, 1)]
    for one in entries:
        await store.record(claim.lease, [one], now=NOW)
    assert await store.journal("run") == entries
    row = await store.get("run")
    assert row is not None
    assert (row.input, row.seed) == (b"\xff", bytes(16))


@pytest.mark.parametrize("dialect", [POSTGRES, MYSQL, SQLITE], ids=lambda dialect: dialect.name)
def test_statements_are_put_together_without_a_database_and_hold_no_value(dialect: object) -> None:
    tables = Tables("stem", dialect, TEXT)  # type: ignore[arg-type]
    hostile = "'; DROP TABLE stem_runs; --"
    asked = [Write.record(LEASE, [Entry(seq=1, key=hostile, payload=hostile.encode())], []), Write.record(LEASE, [], [])]
    statements = record_statements(tables, hostile, asked)
    assert len(statements) == 2
    assert all("DROP" not in sql and "$runs" not in sql for sql, _ in statements)
    assert hostile in statements[1].values
    places = statements[1].sql.count("%s") or statements[1].sql.count("?")
    assert places in (0, len(statements[1].values))


def test_a_write_is_never_in_two_statements() -> None:
    tables = Tables("stem", SQLITE, TEXT)
    leases = [Lease(run_id=f"run-{n:03}", epoch=7, token="token", until=9) for n in range(200)]
    asked = [Write.record(lease, [entry(seq) for seq in range(1, 4)], []) for lease in leases]
    statements = record_statements(tables, "", asked)[1:]
    ids = [{value for value in statement.values if str(value).startswith("run-")} for statement in statements]
    assert len(statements) > 1
    assert sum(len(some) for some in ids) == len(set.union(*ids)) == 200
    assert len(record_statements(tables, "", [Write.record(LEASE, [entry(seq) for seq in range(1, 600)], [])])) == 1


async def test_a_long_write_is_written_whole_and_can_be_repeated(here: Place) -> None:
    store = here.store()
    claim = (await store.create(new_run(), ttl=TTL, now=NOW)).claim
    assert claim is not None
    entries = [entry(seq) for seq in range(1, 600)]
    for _ in range(2):
        await store.record(claim.lease, entries, now=NOW)
    assert await store.journal("run") == entries

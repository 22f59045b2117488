"""How SQLite would go about the batches: every row is found by an index, however many runs there are."""

import asyncio
import sqlite3
from collections.abc import Sequence

import pytest

from perdure.backends.libsql import record_batch, run_batches
from perdure.backends.libsql.large_values import LargeValues, ReferencingValues
from perdure.backends.sql import schema
from perdure.backends.sql.dialect import SQLITE, Statement, Tables
from perdure.backends.sql.recording import Write
from perdure.model.records import Awaited, Item, Lease
from perdure.testing.contract.world import entry

TABLES = Tables("perdure", SQLITE, ReferencingValues())
LEASES = [Lease(run_id=f"run-{n}", epoch=1, token="t", until=1) for n in range(3)]
RECORDS = [Write.record(lease, [entry(1)], [1], [Item(stream="s", n=0, payload=b"")]) for lease in LEASES]
CLOSINGS = [
    Write.suspend(LEASES[0], None, [Awaited("signal", "go")], [], [], None),
    Write.finish(LEASES[1], "completed", b"1", [], [], None),
]
STATEMENTS = {
    "record": record_batch.record_statements(TABLES, "", RECORDS),
    "close": record_batch.ClosingBatch(TABLES, "", CLOSINGS).statements,
    "renew": run_batches.renew_statements(TABLES, "", LEASES, 1, {LEASES[0]: b"[]"}, None),
    "signal": run_batches.signal_request(TABLES, "", "run", "go", b"", None, "identity", None).statements,
}


@pytest.mark.parametrize("statements", STATEMENTS.values(), ids=STATEMENTS)
def test_every_row_is_found_by_an_index(statements: Sequence[Statement]) -> None:
    database = sqlite3.connect(":memory:")
    for sql, values in (*asyncio.run(schema.creation(TABLES)), *LargeValues(TABLES).schema()):
        database.execute(sql, values)
    plans = [row[3] for sql, values in statements for row in database.execute(f"EXPLAIN QUERY PLAN {sql}", values)]
    database.close()
    assert [line for line in plans if line.startswith("SCAN perdure_")] == []
    assert [line for line in plans if line.startswith("SEARCH") and "AND" not in line] == []  # by the namespace alone

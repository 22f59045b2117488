"""How SQLite would go about the batches: every row is found by an index, however many runs there are."""

import asyncio
import sqlite3
from collections.abc import Sequence

import pytest

from perdure.backends.libsql import batching, renewing_batch, signal_batch
from perdure.backends.libsql.closing_batch import ClosingBatch
from perdure.backends.libsql.pieces import Pieces, PieceValues
from perdure.backends.sql import schema, tables, writes
from perdure.backends.sql.dialect import SQLITE
from perdure.backends.sql.session import Statement
from perdure.model.records import Awaited, Item, Lease
from perdure.testing.contract.world import entry

TABLES = tables.Tables("perdure", SQLITE, PieceValues())
LEASES = [Lease(run_id=f"run-{n}", epoch=1, token="t", until=1) for n in range(3)]
RECORDS = [writes.record(lease, [entry(1)], [1], [Item(stream="s", n=0, payload=b"")]) for lease in LEASES]
CLOSINGS = [
    writes.suspend(LEASES[0], None, [Awaited("signal", "go")], [], [], None),
    writes.finish(LEASES[1], "completed", b"1", [], [], None),
]
STATEMENTS = {
    "record": batching.record_statements(TABLES, "", RECORDS),
    "close": ClosingBatch(TABLES, "", CLOSINGS).statements,
    "renew": renewing_batch.renew_statements(TABLES, "", LEASES, 1, None),
    "signal": signal_batch.sending(TABLES, "", "run", "go", b"", None, "identity", None).statements,
}


@pytest.mark.parametrize("statements", STATEMENTS.values(), ids=STATEMENTS)
def test_every_row_is_found_by_an_index(statements: Sequence[Statement]) -> None:
    database = sqlite3.connect(":memory:")
    for sql, values in (*asyncio.run(schema.creation(TABLES)), *Pieces(TABLES).schema()):
        database.execute(sql, values)
    plans = [row[3] for sql, values in statements for row in database.execute(f"EXPLAIN QUERY PLAN {sql}", values)]
    database.close()
    assert [line for line in plans if line.startswith("SCAN perdure_")] == []
    assert [line for line in plans if line.startswith("SEARCH") and "AND" not in line] == []  # by the namespace alone

"""Records as one batch that needs no answer in between, so that it is one request whatever it carries.

Every statement is joined to the fence: what a stale lease would write is just not written, and harms nobody else in the batch.
What contradicts the database makes a statement fail, on purpose: a place that is taken by its primary key, an inbox row that is
not there by a NOT NULL that nothing else could violate. Then the batch is rolled back as a whole, and somebody looks closer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

from perdure.backends.base.batching import Reply
from perdure.backends.sql.recording import fences_from, is_current
from perdure.backends.sql.rows import ENTRY_COLUMNS, ENTRY_FIELDS, entry_values
from perdure.backends.sql.session import Given, Result, Statement
from perdure.backends.sql.tables import Tables, in_pieces
from perdure.backends.sql.writes import Write
from perdure.errors import LeaseLost
from perdure.model.records import Pulse

MAX_ROWS: Final = 500  # of a statement; with sixteen values each that is far from the 32,766 it may have

# A row that is given begins with the run's id and the lease's epoch and token: column1, column2 and column3.
_HELD: Final = """
    CROSS JOIN $runs AS run ON run.namespace = ?1 AND run.id = given.column1
        AND run.epoch = given.column2 AND run.lease_token = given.column3
"""
_FENCE: Final = "SELECT id, epoch, lease_token, inbox_seq, cancel_requested FROM $runs WHERE namespace = ?1 AND id IN ({})"
_APPEND: Final = f"""
    INSERT INTO $steps (namespace, run_id, {ENTRY_COLUMNS})
    SELECT run.namespace, run.id, {", ".join(f"given.column{number}" for number in range(4, 4 + len(ENTRY_FIELDS)))}
    FROM (VALUES {{}}) AS given {_HELD}
"""
_ADD_ITEMS: Final = f"""
    INSERT INTO $items (namespace, run_id, stream, n, payload)
    SELECT run.namespace, run.id, given.column4, given.column5, given.column6 FROM (VALUES {{}}) AS given {_HELD}
"""
_CONSUME: Final = f"""
    UPDATE $signals SET consumed_by = used.token
    FROM (SELECT run.id AS run_id, given.column3 AS token, given.column4 AS seq FROM (VALUES {{}}) AS given {_HELD}) AS used
    WHERE $signals.namespace = ?1 AND $signals.run_id = used.run_id AND $signals.seq = used.seq AND $signals.consumed_by IS NULL
"""
_MISS: Final = f"""
    INSERT INTO $signals (namespace, run_id, seq, kind, name, identity, payload)
    SELECT run.namespace, run.id, given.column4, NULL, '', '', x'' FROM (VALUES {{}}) AS given {_HELD}
    WHERE NOT EXISTS (
        SELECT 1 FROM $signals AS there WHERE there.namespace = ?1 AND there.run_id = run.id AND there.seq = given.column4
    )
"""


def fence_statement(tables: Tables, namespace: str, run_ids: Collection[str]) -> Statement:
    """What shows who holds these runs, for `fences_from`."""
    given = Given()
    return tables.statement(_FENCE.format(given.many(sorted(run_ids))), namespace, *given.values)


def record_statements(tables: Tables, namespace: str, writes: Sequence[Write]) -> list[Statement]:
    """What appends, consumes and adds all of these, in one transaction; `answers_from` says what became of each write."""
    entries = [[*lease_values(write), *entry_values(entry)] for write in writes for entry in write.entries]
    items = [[*lease_values(write), item.stream, item.n, item.payload] for write in writes for item in write.items]
    used = [[*lease_values(write), seq] for write in writes for seq in write.consume]
    wanted = ((_APPEND, entries), (_ADD_ITEMS, items), (_MISS, used), (_CONSUME, used))
    return [
        fence_statement(tables, namespace, {write.run_id for write in writes}),
        *(_filled(tables, namespace, text, piece) for text, rows in wanted for piece in in_pieces(rows, MAX_ROWS)),
    ]


def answers_from(tables: Tables, writes: Sequence[Write], results: Sequence[Result]) -> list[Reply[Pulse]]:
    """What each write is answered, by what `record_statements` gave."""
    fences = fences_from(tables, results[0])
    return [
        fences[write.run_id][2] if is_current(fences, write.lease) else LeaseLost(write.run_id, write.lease.epoch)
        for write in writes
    ]


def lease_values(write: Write) -> list[Any]:
    """What the fence compares."""
    return [write.run_id, write.lease.epoch, write.lease.token]


def _filled(tables: Tables, namespace: str, template: str, rows: Sequence[Sequence[Any]]) -> Statement:
    given = Given()
    lines = ", ".join(f"({given.many(row)})" for row in rows)
    return tables.statement(template.format(lines), namespace, *given.values)

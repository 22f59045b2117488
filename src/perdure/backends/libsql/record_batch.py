"""Records, ends and sleeps of runs, each as one batch of statements that needs no reply in between: one request.

Every statement is joined to the fence: what a stale lease would write is not written, and the rest of the batch is unaffected.
What contradicts the database makes a statement fail, on purpose: a taken place by its primary key, a missing inbox row by a NOT
NULL that nothing else could violate. Then the batch is rolled back as a whole, and the store falls back to the verbs that read
before they write.

What an end or a sleep depends on (does the run have a parent, and does that wait; has an awaited inbox row arrived) is decided by
the statements themselves. Sleeps come before ends: a parent that goes to sleep is woken by a child that ends in the same batch.
The statement that ends a run's lease is the last one about that run.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

from perdure.backends.base.batching import Reply
from perdure.backends.sql.closing import was_closed
from perdure.backends.sql.dialect import Statement, Tables, chunks
from perdure.backends.sql.recording import Write, fences_from, is_current
from perdure.backends.sql.rows import (
    ENTRY_COLUMNS,
    ENTRY_FIELDS,
    NO_LEASE_SQL,
    NO_PROBLEM_SQL,
    SIGNAL_COLUMNS,
    awaited_text,
    entry_values,
    identity,
    signal_from,
)
from perdure.backends.sql.session import Parameters, Result, Session
from perdure.errors import LeaseLost
from perdure.model.records import ENDED, Pulse, Signal

MAX_ROWS: Final = 500  # of a statement; with sixteen values each that is far from the 32,766 it may have

# An input row begins with the run's id and the lease's epoch and token: column1, column2 and column3.
_JOIN_FENCE: Final = """
    CROSS JOIN $runs AS run ON run.namespace = ?1 AND run.id = input_row.column1
        AND run.epoch = input_row.column2 AND run.lease_token = input_row.column3
"""
_FENCE: Final = "SELECT id, epoch, lease_token, inbox_seq, cancel_requested FROM $runs WHERE namespace = ?1 AND id IN ({})"
_APPEND: Final = f"""
    INSERT INTO $steps (namespace, run_id, {ENTRY_COLUMNS})
    SELECT run.namespace, run.id, {", ".join(f"input_row.column{number}" for number in range(4, 4 + len(ENTRY_FIELDS)))}
    FROM (VALUES {{}}) AS input_row {_JOIN_FENCE}
"""
_ADD_ITEMS: Final = f"""
    INSERT INTO $items (namespace, run_id, stream, n, payload)
    SELECT run.namespace, run.id, input_row.column4, input_row.column5, input_row.column6
    FROM (VALUES {{}}) AS input_row {_JOIN_FENCE}
"""
_CONSUME: Final = f"""
    UPDATE $signals SET consumed_by = used.token
    FROM (
        SELECT run.id AS run_id, input_row.column3 AS token, input_row.column4 AS seq
        FROM (VALUES {{}}) AS input_row {_JOIN_FENCE}
    ) AS used
    WHERE $signals.namespace = ?1 AND $signals.run_id = used.run_id AND $signals.seq = used.seq AND $signals.consumed_by IS NULL
"""
_REFUSE_MISSING: Final = f"""
    INSERT INTO $signals (namespace, run_id, seq, kind, name, identity, payload)
    SELECT run.namespace, run.id, input_row.column4, NULL, '', '', x'' FROM (VALUES {{}}) AS input_row {_JOIN_FENCE}
    WHERE NOT EXISTS (
        SELECT 1 FROM $signals AS there WHERE there.namespace = ?1 AND there.run_id = run.id AND there.seq = input_row.column4
    )
"""

# In what closes a run, ?2, ?3 and ?4 are the run and its lease, ?5 is the time if a test passed one.
_NOW: Final = "coalesce(?5, $clock)"
_HELD: Final = "namespace = ?1 AND id = ?2 AND epoch = ?3 AND lease_token = ?4"
_ENDED: Final = ", ".join(f"'{status}'" for status in sorted(ENDED))

_WAITING: Final = """
    FROM $signals INDEXED BY $signals_waiting
    WHERE namespace = ?1 AND run_id = ?2 AND consumed_by IS NULL AND (kind, name) IN (VALUES {})
"""
_SLEEP: Final = f"""
    UPDATE $runs SET status = 'suspended', waiting_for = ?6, updated_at = {_NOW}, attempts = 0, {NO_LEASE_SQL},
        {NO_PROBLEM_SQL}, wake_at = CASE WHEN cancel_requested = 0 THEN ?7 ELSE min(coalesce(?7, {_NOW}), {_NOW}) END
    WHERE {_HELD}
"""
_ARRIVED: Final = f"""
    SELECT {SIGNAL_COLUMNS} {_WAITING} AND EXISTS (SELECT 1 FROM $runs WHERE {_HELD}) ORDER BY seq
"""
# The parent's row is changed after its inbox: the new inbox row takes its seq from the parent's `inbox_seq`.
_NOTIFY_PARENT: Final = f"""
    INSERT INTO $signals (namespace, run_id, seq, kind, name, payload, identity)
    SELECT ?1, parent.id, parent.inbox_seq + 1, 'child', child.parent_key, ?6, ?7
    FROM (SELECT parent_id, parent_key FROM $runs WHERE {_HELD} AND parent_key IS NOT NULL AND parent_id <> id) AS child
    CROSS JOIN $runs AS parent ON parent.namespace = ?1 AND parent.id = child.parent_id AND parent.status NOT IN ({_ENDED})
"""
_WAKE_PARENT: Final = f"""
    UPDATE $runs SET inbox_seq = $runs.inbox_seq + 1, wake_at = CASE
        WHEN $runs.status = 'suspended' AND EXISTS (
            SELECT 1 FROM json_each($runs.waiting_for) AS awaited
            WHERE json_extract(awaited.value, '$[0]') = 'child' AND json_extract(awaited.value, '$[1]') = child.parent_key
        ) THEN min(coalesce($runs.wake_at, {_NOW}), {_NOW})
        ELSE $runs.wake_at END
    FROM (SELECT parent_id, parent_key FROM $runs WHERE {_HELD} AND parent_key IS NOT NULL AND parent_id <> id) AS child
    WHERE $runs.namespace = ?1 AND $runs.id = child.parent_id AND $runs.status NOT IN ({_ENDED})
"""
_END: Final = f"""
    UPDATE $runs SET status = ?6, outcome = ?7, updated_at = {_NOW}, wake_at = NULL, waiting_for = '[]', {NO_LEASE_SQL},
        {NO_PROBLEM_SQL}, parent_notified = CASE WHEN parent_id IS NULL OR parent_key IS NULL THEN parent_notified ELSE 1 END
    WHERE {_HELD}
"""


def fence_statement(tables: Tables, namespace: str, run_ids: Collection[str]) -> Statement:
    """The statement that reads the leases of these runs, for `fences_from`."""
    params = Parameters()
    return tables.statement(_FENCE.format(params.many(sorted(run_ids))), namespace, *params.values)


def record_statements(tables: Tables, namespace: str, writes: Sequence[Write]) -> list[Statement]:
    """The statements of one transaction that append, consume and add all of these; `record_replies` reads their results."""
    entries = [[*lease_values(write), *entry_values(entry)] for write in writes for entry in write.entries]
    items = [[*lease_values(write), item.stream, item.n, item.payload] for write in writes for item in write.items]
    used = [[*lease_values(write), seq] for write in writes for seq in write.consume]
    wanted = ((_APPEND, entries), (_ADD_ITEMS, items), (_REFUSE_MISSING, used), (_CONSUME, used))
    return [
        fence_statement(tables, namespace, {write.run_id for write in writes}),
        *(_fill_rows(tables, namespace, text, chunk) for text, rows in wanted for chunk in chunks(rows, MAX_ROWS)),
    ]


def record_replies(tables: Tables, writes: Sequence[Write], results: Sequence[Result]) -> list[Reply[Pulse]]:
    """The reply to each write, from the results of `record_statements`."""
    fences = fences_from(tables, results[0])
    return [
        fences[write.run_id][2] if is_current(fences, write.lease) else LeaseLost(write.run_id, write.lease.epoch)
        for write in writes
    ]


def lease_values(write: Write) -> list[Any]:
    """The values that the fence compares."""
    return [write.run_id, write.lease.epoch, write.lease.token]


def _fill_rows(tables: Tables, namespace: str, template: str, rows: Sequence[Sequence[Any]]) -> Statement:
    params = Parameters()
    lines = ", ".join(f"({params.many(row)})" for row in rows)
    return tables.statement(template.format(lines), namespace, *params.values)


class ClosingBatch:
    """The statements that end or suspend runs, each of another write, and the replies that their results mean."""

    def __init__(self, tables: Tables, namespace: str, writes: Sequence[Write]) -> None:
        self._tables = tables
        self._namespace = namespace
        self._writes = writes
        self.statements = record_statements(tables, namespace, writes)
        # By run, the number of the statement that selects the awaited rows which had arrived before it could sleep.
        self._arrived: dict[str, int] = {}
        for write in sorted(writes, key=lambda write: write.status != "suspended"):
            if write.status == "suspended":
                self._add_sleep(write)
            else:
                self._add_end(write)

    def _add_sleep(self, write: Write) -> None:
        slept = Parameters()
        slept.many([*lease_values(write), write.now, awaited_text(write.waiting_for), write.wake_at])
        if not write.waiting_for:
            self._add(_SLEEP, slept)
            return
        self._add(f"{_SLEEP} AND NOT EXISTS (SELECT 1 {_WAITING.format(_awaited_values(slept, write))})", slept)
        arrived = Parameters()
        arrived.many([*lease_values(write), write.now])
        self._arrived[write.run_id] = len(self.statements)
        self._add(_ARRIVED.format(_awaited_values(arrived, write)), arrived)

    def _add_end(self, write: Write) -> None:
        notified, ended = Parameters(), Parameters()
        notified.many([*lease_values(write), write.now, write.outcome, identity(write.run_id, None)])
        ended.many([*lease_values(write), write.now, write.status, write.outcome])
        self._add(_NOTIFY_PARENT, notified)
        self._add(_WAKE_PARENT, notified)
        self._add(_END, ended)

    def _add(self, template: str, params: Parameters) -> None:
        self.statements.append(self._tables.statement(template, self._namespace, *params.values))

    async def replies(self, db: Session, results: Sequence[Result], *, is_repeated: bool) -> list[Reply[list[Signal]]]:
        """The reply to each write. When the batch was repeated, a run that its lost attempt closed counts as closed by it."""
        fences = fences_from(self._tables, results[0])
        replies: list[Reply[list[Signal]]] = []
        for write in self._writes:
            if is_current(fences, write.lease):
                number = self._arrived.get(write.run_id)
                rows = [] if number is None else results[number].rows
                replies.append([signal_from(row, self._tables.values) for row in rows])
            elif is_repeated and await was_closed(db, write):
                replies.append([])
            else:
                replies.append(LeaseLost(write.run_id, write.lease.epoch))
        return replies


def _awaited_values(params: Parameters, write: Write) -> str:
    """What the run waits for, as rows of kind and name."""
    addresses = sorted((awaited.kind, awaited.name) for awaited in write.waiting_for)
    return ", ".join(f"({params.many(address)})" for address in addresses)

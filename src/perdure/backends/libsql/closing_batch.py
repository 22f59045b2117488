"""Ends and sleeps as one batch that needs no answer in between, like records.

What depends on the run (has it a parent, and does that wait; has what it waits for arrived) is decided by the statements
themselves, each joined to the fence. Who goes to sleep comes before who ends: a parent that goes to sleep hears of a child that
ends with it. What ends a run's lease comes last of what concerns it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from perdure.backends.base.batching import Reply
from perdure.backends.libsql.batching import lease_values, record_statements
from perdure.backends.sql.closing import was_closed
from perdure.backends.sql.recording import fences_from, is_current
from perdure.backends.sql.rows import SIGNAL_COLUMNS, awaited_text, identity, signal_from
from perdure.backends.sql.session import Given, Result, Session
from perdure.backends.sql.tables import Tables
from perdure.backends.sql.writes import Write
from perdure.errors import LeaseLost
from perdure.model.records import ENDED, Signal

# ?2, ?3 and ?4 are the run and its lease, ?5 the time if a test gave one.
_NOW: Final = "coalesce(?5, $clock)"
_HELD: Final = "namespace = ?1 AND id = ?2 AND epoch = ?3 AND lease_token = ?4"
_ENDED: Final = ", ".join(f"'{status}'" for status in sorted(ENDED))
_WITHOUT_LEASE: Final = "lease_token = NULL, lease_owner = NULL, lease_until = NULL"

_WAITING: Final = """
    FROM $signals INDEXED BY $signals_waiting
    WHERE namespace = ?1 AND run_id = ?2 AND consumed_by IS NULL AND (kind, name) IN (VALUES {})
"""
_SLEEP: Final = f"""
    UPDATE $runs SET status = 'suspended', waiting_for = ?6, updated_at = {_NOW}, attempts = 0, {_WITHOUT_LEASE},
        wake_at = CASE WHEN cancel_requested = 0 THEN ?7 ELSE min(coalesce(?7, {_NOW}), {_NOW}) END
    WHERE {_HELD}
"""
_ARRIVED: Final = f"""
    SELECT {SIGNAL_COLUMNS} {_WAITING} AND EXISTS (SELECT 1 FROM $runs WHERE {_HELD}) ORDER BY seq
"""
# The parent's row is told after its inbox: its `inbox_seq` is what the inbox goes by.
_TELL: Final = f"""
    INSERT INTO $signals (namespace, run_id, seq, kind, name, payload, identity)
    SELECT ?1, parent.id, parent.inbox_seq + 1, 'child', child.parent_key, ?6, ?7
    FROM (SELECT parent_id, parent_key FROM $runs WHERE {_HELD} AND parent_key IS NOT NULL AND parent_id <> id) AS child
    CROSS JOIN $runs AS parent ON parent.namespace = ?1 AND parent.id = child.parent_id AND parent.status NOT IN ({_ENDED})
"""
_WAKE: Final = f"""
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
    UPDATE $runs SET status = ?6, outcome = ?7, updated_at = {_NOW}, wake_at = NULL, waiting_for = '[]', {_WITHOUT_LEASE},
        parent_notified = CASE WHEN parent_id IS NULL OR parent_key IS NULL THEN parent_notified ELSE 1 END
    WHERE {_HELD}
"""


class ClosingBatch:
    """The statements that close these runs, each of another write, and what their results mean."""

    def __init__(self, tables: Tables, namespace: str, writes: Sequence[Write]) -> None:
        self._tables = tables
        self._namespace = namespace
        self._writes = writes
        self.statements = record_statements(tables, namespace, writes)
        # Where the rows stand that had arrived before a run could go to sleep.
        self._arrived: dict[str, int] = {}
        for write in sorted(writes, key=lambda write: write.status != "suspended"):
            if write.status == "suspended":
                self._sleep(write)
            else:
                self._end(write)

    def _sleep(self, write: Write) -> None:
        given = Given()
        given.many([*lease_values(write), write.now, awaited_text(write.waiting_for), write.wake_at])
        if not write.waiting_for:
            self._add(_SLEEP, given)
            return
        waiting = _WAITING.format(", ".join(f"({given.one(kind)}, {given.one(name)})" for kind, name in _addresses(write)))
        self._add(f"{_SLEEP} AND NOT EXISTS (SELECT 1 {waiting})", given)
        asked = Given()
        asked.many([*lease_values(write), write.now])
        places = ", ".join(f"({asked.one(kind)}, {asked.one(name)})" for kind, name in _addresses(write))
        self._arrived[write.run_id] = len(self.statements)
        self._add(_ARRIVED.format(places), asked)

    def _end(self, write: Write) -> None:
        told, ended = Given(), Given()
        told.many([*lease_values(write), write.now, write.outcome, identity(write.run_id, None)])
        ended.many([*lease_values(write), write.now, write.status, write.outcome])
        self._add(_TELL, told)
        self._add(_WAKE, told)
        self._add(_END, ended)

    def _add(self, template: str, given: Given) -> None:
        self.statements.append(self._tables.statement(template, self._namespace, *given.values))

    async def answers(self, db: Session, results: Sequence[Result], *, is_repeated: bool) -> list[Reply[list[Signal]]]:
        """What each write is answered. Repeated, since the reply was lost, what it closed before is left alone."""
        fences = fences_from(self._tables, results[0])
        answers: list[Reply[list[Signal]]] = []
        for write in self._writes:
            if is_current(fences, write.lease):
                place = self._arrived.get(write.run_id)
                rows = [] if place is None else results[place].rows
                answers.append([signal_from(row, self._tables.values) for row in rows])
            elif is_repeated and await was_closed(db, write):
                answers.append([])
            else:
                answers.append(LeaseLost(write.run_id, write.lease.epoch))
        return answers


def _addresses(write: Write) -> list[tuple[str, str]]:
    return sorted((awaited.kind, awaited.name) for awaited in write.waiting_for)

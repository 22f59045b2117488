"""Heartbeats as one batch: they are small, and nothing should keep them waiting that need not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from perdure.backends.libsql.batching import MAX_ROWS, fence_statement
from perdure.backends.sql.recording import fences_from, is_current
from perdure.backends.sql.session import Given, Result, Statement
from perdure.backends.sql.tables import Tables, in_pieces
from perdure.model.records import Lease, Pulse

# ?2 is the time if a test gave one, ?3 the length.
_NOW: Final = "coalesce(?2, $clock)"
_PROLONG: Final = f"""
    UPDATE $runs SET lease_until = {_NOW} + ?3, wake_at = {_NOW} + ?3, updated_at = {_NOW}
    WHERE namespace = ?1 AND id IN (SELECT column1 FROM (VALUES {{}})) AND (id, epoch, lease_token) IN (VALUES {{}})
"""


def renew_statements(tables: Tables, namespace: str, leases: Sequence[Lease], length: int, now: int | None) -> list[Statement]:
    """What prolongs each of these leases that is still current to `length` microseconds from now."""
    statements = [fence_statement(tables, namespace, {lease.run_id for lease in leases})]
    for piece in in_pieces(leases, MAX_ROWS):
        given = Given()
        given.many([now, length])
        ids = ", ".join(f"({given.one(lease.run_id)})" for lease in piece)
        whole = ", ".join(f"({given.many([lease.run_id, lease.epoch, lease.token])})" for lease in piece)
        statements.append(tables.statement(_PROLONG.format(ids, whole), namespace, *given.values))
    return statements


def pulses_from(tables: Tables, leases: Sequence[Lease], results: Sequence[Result]) -> list[Pulse | None]:
    """What each holder is told; None when the lease is another's by now."""
    fences = fences_from(tables, results[0])
    return [fences[lease.run_id][2] if is_current(fences, lease) else None for lease in leases]

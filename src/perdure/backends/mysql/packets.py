"""The usual case of a verb as one packet: a transaction whose statements do not depend on each other's results.

A packet has expectations instead of branches. Where one is not met (a lease is stale, an entry or a run exists already, a parent
has to be notified, an awaited signal has arrived, a queue has limits) a statement fails, the statements after it, COMMIT among
them, are not executed, and nothing is written. Then the verb of `backends.sql` runs, which reads before it writes and covers all
cases.

A transaction that the server would not take as one packet is sent in several, see `large_values`.

A statement is made to fail by an addition to the highest number that the server knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any, Final, NamedTuple

from perdure.backends.mysql.errors import DUPLICATE, code_of
from perdure.backends.mysql.literals import Quote, fill, literal
from perdure.backends.sql.dialect import Tables
from perdure.backends.sql.recording import Write
from perdure.backends.sql.rows import (
    ENTRY_COLUMNS,
    NO_LEASE_SQL,
    NO_PROBLEM_SQL,
    RUN_FIELDS,
    SIGNAL_COLUMNS,
    awaited_text,
    entry_values,
    run_values,
    signal_values,
)
from perdure.backends.sql.runs import RunCreation, last_seq
from perdure.backends.sql.session import Parameters, Result
from perdure.model.records import Created, Pulse

_OUT_OF_RANGE: Final = 1690
_FAILS_UNLESS: Final = "18446744073709551615 + IF({}, 0, 1)"

# A join looks the runs up one by one, in the given order, and locks nothing else: for a list of ids the server might read, and
# lock, all rows.
_JOIN_RUNS: Final = """) AS held LEFT JOIN $runs AS run
        ON run.namespace = ?1 AND run.id = held.id AND run.epoch = held.epoch AND run.lease_token = held.token
"""
_SELECT_HELD: Final = (
    f"SELECT held.request, run.inbox_seq, run.cancel_requested, {_FAILS_UNLESS.format('run.id IS NOT NULL')} FROM (SELECT ",
    f"{_JOIN_RUNS} LOCK IN SHARE MODE",
)
_SELECT_CLOSABLE: Final = (
    f"SELECT {_FAILS_UNLESS.format('run.id IS NOT NULL AND (held.sleeps OR run.parent_id IS NULL)')} FROM (SELECT ",
    f"{_JOIN_RUNS} FOR UPDATE",
)
_APPEND: Final = f"INSERT INTO $steps (namespace, run_id, {ENTRY_COLUMNS}) VALUES "
_ADD_ITEMS: Final = "INSERT INTO $items (namespace, run_id, stream, n, payload) VALUES "
# A row that is consumed already counts as matched.
_CONSUME: Final = """
    UPDATE $signals SET consumed_by = COALESCE(consumed_by, {}) WHERE namespace = ?1 AND run_id = {} AND seq IN ({})
"""
_CHECK_CONSUMED: Final = f"SELECT {_FAILS_UNLESS.format('ROW_COUNT() = ?2')}"
_WAITING: Final = "EXISTS (SELECT 1 FROM $signals WHERE namespace = ?1 AND run_id = {} AND $unconsumed AND (kind, name) IN ({}))"
_CHECK_NONE_WAITS: Final = f"SELECT {_FAILS_UNLESS.format(f'NOT {_WAITING}')}"
_SET_TIME: Final = "SET @perdure_at = $clock"
_SELECT_TIME: Final = "SELECT @perdure_at"
# Of a creation with leases: it fails when one of the queues has limits.
_LIMITED: Final = "EXISTS (SELECT 1 FROM $queues WHERE namespace = ?1 AND queue IN ({}))"
_SELECT_TIME_UNLESS_LIMITED: Final = f"SELECT @perdure_at, {_FAILS_UNLESS.format(f'NOT {_LIMITED}')}"
_SLEEP: Final = f"""
    UPDATE $runs SET status = 'suspended', waiting_for = ?3, updated_at = COALESCE(?5, @perdure_at), attempts = 0,
        wake_at = IF(cancel_requested, LEAST(COALESCE(?4, ?5, @perdure_at), COALESCE(?5, @perdure_at)), ?4),
        {NO_LEASE_SQL}, {NO_PROBLEM_SQL}
    WHERE namespace = ?1 AND id = ?2
"""
_END: Final = f"""
    UPDATE $runs SET status = ?3, outcome = ?4, updated_at = COALESCE(?5, @perdure_at), wake_at = NULL, waiting_for = '[]',
        {NO_LEASE_SQL}, {NO_PROBLEM_SQL}
    WHERE namespace = ?1 AND id = ?2
"""
_CREATE: Final = f"INSERT INTO $runs (namespace, {', '.join(RUN_FIELDS)}, lease_token, journal_length, inbox_seq) VALUES "
_DELIVER: Final = f"INSERT INTO $signals (namespace, run_id, {SIGNAL_COLUMNS}, identity) VALUES "


def is_unexpected_state(error: BaseException) -> bool:
    """Whether a packet failed because an expectation was not met, so that nothing was written."""
    return code_of(error) in {_OUT_OF_RANGE, DUPLICATE}


class _ServerInstant(NamedTuple):
    """An instant that only the server knows: this many microseconds after it executes the packet."""

    after: int

    @property
    def sql(self) -> bytes:
        return b"@perdure_at + %d" % self.after


class Packet:
    """Builds the statements of one transaction."""

    def __init__(self, tables: Tables, namespace: str, quote: Quote, max_statement: int) -> None:
        """Rows are inserted by statements of up to `max_statement` bytes, or of one row."""
        self._tables = tables
        self._max_statement = max_statement
        self._namespace = namespace
        self._quote = quote
        self.statements: list[bytes] = []

    def add(self, template: str, *values: Any) -> None:
        """Add one statement; `?1` is the namespace."""
        sql, stored = self._tables.statement(template, self._namespace, *values)
        self.statements.append(fill(sql, stored, self._quote))

    def add_rows(self, template: str, rows: Iterable[Sequence[Any]]) -> None:
        """Add statements that insert rows, each after the namespace: one if that is not too long, and none for no rows."""
        before = self._tables.statement(template).sql.encode()
        lines: list[bytes] = []
        size = 0
        for row in rows:
            line = b"(%b)" % self._values((self._namespace, *row))
            if lines and size + len(line) > self._max_statement:
                self.statements.append(before + b",".join(lines))
                lines, size = [], 0
            lines.append(line)
            size += len(line) + 1
        if lines:
            self.statements.append(before + b",".join(lines))

    def add_held(self, template: tuple[str, str], names: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Add one statement over these rows, a derived table with these column names between the halves of the template."""
        before, after = template
        first = b", ".join(
            b"%b AS %b" % (self._values([value]), name.encode()) for name, value in zip(names, rows[0], strict=True)
        )
        others = [b" UNION ALL SELECT " + self._values(row) for row in rows[1:]]
        sql, stored = self._tables.statement(after, self._namespace)
        self.statements.append(b"".join([before.encode(), first, *others, fill(sql, stored, self._quote)]))

    def _values(self, row: Sequence[Any]) -> bytes:
        return b",".join([value.sql if isinstance(value, _ServerInstant) else literal(value, self._quote) for value in row])

    def add_writes(self, writes: Sequence[Write]) -> None:
        """Add the statements that write entries and items, and consume inbox rows."""
        self.add_rows(_APPEND, ([write.run_id, *entry_values(entry)] for write in writes for entry in write.entries))
        self.add_rows(_ADD_ITEMS, ([write.run_id, item.stream, item.n, item.payload] for write in writes for item in write.items))
        for write in writes:
            if write.consume:
                params = Parameters()
                run_id, mark = params.one(write.run_id), params.one(write.lease.token)
                self.add(_CONSUME.format(mark, run_id, params.many(write.consume)), *params.values)
                self.add(_CHECK_CONSUMED, len(write.consume))


def record(writes: Sequence[Write], packet: Packet) -> None:
    """Add to the packet what appends these writes, expecting that their leases are current and their places free."""
    packet.add_held(_SELECT_HELD, ("request", "id", "epoch", "token"), _lease_rows(writes))
    packet.add_writes(writes)


def _lease_rows(writes: Sequence[Write]) -> list[tuple[int, str, int, str]]:
    """The leases in the order of their runs, which is the order in which every transaction locks several."""
    rows = [(number, write.run_id, write.lease.epoch, write.lease.token) for number, write in enumerate(writes)]
    return sorted(rows, key=lambda row: row[1].encode())


def pulses_from(results: Sequence[Result]) -> list[Pulse]:
    """The reply to each write of `record`."""
    return [Pulse(int(inbox_seq), bool(cancel)) for _, inbox_seq, cancel, _ in sorted(results[0].rows, key=itemgetter(0))]


def close(writes: Sequence[Write], packet: Packet) -> None:
    """Add to the packet what records, and ends runs without a parent or suspends runs without an awaited inbox row."""
    held = [(*row, writes[row[0]].status == "suspended") for row in _lease_rows(writes)]
    packet.add_held(_SELECT_CLOSABLE, ("request", "id", "epoch", "token", "sleeps"), held)
    packet.add_writes(writes)
    packet.add(_SET_TIME)
    for write in writes:
        if write.status == "suspended":
            _suspend(packet, write)
        else:
            packet.add(_END, write.run_id, write.status, write.outcome, write.now)


def _suspend(packet: Packet, write: Write) -> None:
    if write.waiting_for:
        params = Parameters()
        run_id = params.one(write.run_id)
        addresses = ", ".join(f"({params.many([awaited.kind, awaited.name])})" for awaited in write.waiting_for)
        packet.add(_CHECK_NONE_WAITS.format(run_id, addresses), *params.values)
    packet.add(_SLEEP, write.run_id, awaited_text(write.waiting_for), write.wake_at, write.now)


def create(creations: Sequence[RunCreation], packet: Packet) -> None:
    """Add to the packet what creates these runs, expecting that none exists, and none that is leased is in a limited queue."""
    packet.add(_SET_TIME)
    in_order = sorted(creations, key=lambda creation: creation.run.id.encode())
    packet.add_rows(_CREATE, (_run_row(creation) for creation in in_order))
    packet.add_rows(_APPEND, ([creation.run.id, *entry_values(entry)] for creation in in_order for entry in creation.entries))
    packet.add_rows(_DELIVER, ([creation.run.id, *signal_values(row)] for creation in in_order for row in creation.inbox))
    queues = sorted({creation.run.queue for creation in creations if creation.length is not None})
    if queues:
        params = Parameters()
        packet.add(_SELECT_TIME_UNLESS_LIMITED.format(params.many(queues)), *params.values)
    else:
        packet.add(_SELECT_TIME)


def _run_row(creation: RunCreation) -> list[Any]:
    run = creation.result_at(0 if creation.now is None else creation.now).run
    since = _microseconds_after_creation(creation) if creation.now is None else {}
    row = [
        _ServerInstant(since[name]) if name in since else value for name, value in zip(RUN_FIELDS, run_values(run), strict=True)
    ]
    return [*row, None if creation.length is None else creation.token, last_seq(creation.entries), last_seq(creation.inbox)]


def _microseconds_after_creation(creation: RunCreation) -> dict[str, int]:
    """The columns of a new run that depend on the instant of its creation, and how long after that they are."""
    since = {"updated_at": 0}
    if creation.created_at is None:
        since["created_at"] = 0
    if creation.length is not None:
        since |= {"epoch": 0, "lease_until": creation.length, "wake_at": creation.length}
    elif creation.run.start_at is None:
        since["wake_at"] = 0
    return since


def created_from(creations: Sequence[RunCreation], results: Sequence[Result]) -> list[Created]:
    """The runs that `create` has created."""
    at = int(results[-1].rows[0][0])
    return [creation.result_at(at if creation.now is None else creation.now) for creation in creations]

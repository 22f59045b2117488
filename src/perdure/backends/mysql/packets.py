"""What nearly always happens, as one packet: a transaction whose statements need no answer in between.

A packet says what it expects and has no branches. Where something is otherwise (a lease that is stale, an entry or a run that is
there already, a parent to be told, an awaited signal that has come) a statement of it fails, the ones after it are not carried
out, COMMIT among them, and nothing is written. Then the verb goes the long way, which reads before it writes and finds out what
it was: the verbs of `sql_store`, which say everything that is said here once more, for every case.

An expectation is made to fail by an addition to the highest number that there is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any, Final, NamedTuple

from perdure.backends.mysql.errors import DUPLICATE, code_of
from perdure.backends.mysql.literals import Quote, filled, literal
from perdure.backends.sql.rows import (
    ENTRY_COLUMNS,
    RUN_FIELDS,
    SIGNAL_COLUMNS,
    awaited_text,
    entry_values,
    run_values,
    signal_values,
)
from perdure.backends.sql.runs import Begin, last_seq
from perdure.backends.sql.session import Given, Result
from perdure.backends.sql.tables import Tables
from perdure.backends.sql.writes import Write
from perdure.model.records import Created, Pulse

_OUT_OF_RANGE: Final = 1690
_FAILS_UNLESS: Final = "18446744073709551615 + IF({}, 0, 1)"

# The runs are looked up one by one, in the order in which they are given, and nothing else is locked: by a list of ids the server
# might read, and lock, all there are.
_JOINED: Final = """) AS held LEFT JOIN $runs AS run
        ON run.namespace = ?1 AND run.id = held.id AND run.epoch = held.epoch AND run.lease_token = held.token
"""
_HELD: Final = (
    f"SELECT held.request, run.inbox_seq, run.cancel_requested, {_FAILS_UNLESS.format('run.id IS NOT NULL')} FROM (SELECT ",
    f"{_JOINED} LOCK IN SHARE MODE",
)
_CLOSABLE: Final = (
    f"SELECT {_FAILS_UNLESS.format('run.id IS NOT NULL AND (held.sleeps OR run.parent_id IS NULL)')} FROM (SELECT ",
    f"{_JOINED} FOR UPDATE",
)
_APPEND: Final = f"INSERT INTO $steps (namespace, run_id, {ENTRY_COLUMNS}) VALUES "
_ADD: Final = "INSERT INTO $items (namespace, run_id, stream, n, payload) VALUES "
# Also one that is consumed already counts as found.
_CONSUME: Final = """
    UPDATE $signals SET consumed_by = COALESCE(consumed_by, {}) WHERE namespace = ?1 AND run_id = {} AND seq IN ({})
"""
_CONSUMED: Final = f"SELECT {_FAILS_UNLESS.format('ROW_COUNT() = ?2')}"
_WAITING: Final = "EXISTS (SELECT 1 FROM $signals WHERE namespace = ?1 AND run_id = {} AND $unconsumed AND (kind, name) IN ({}))"
_NONE_WAITS: Final = f"SELECT {_FAILS_UNLESS.format(f'NOT {_WAITING}')}"
_TIME: Final = "SET @perdure_at = $clock"
_GIVE_TIME: Final = "SELECT @perdure_at"
_SLEEP: Final = """
    UPDATE $runs SET status = 'suspended', waiting_for = ?3, updated_at = COALESCE(?5, @perdure_at), attempts = 0,
        wake_at = IF(cancel_requested, LEAST(COALESCE(?4, ?5, @perdure_at), COALESCE(?5, @perdure_at)), ?4),
        lease_token = NULL, lease_owner = NULL, lease_until = NULL
    WHERE namespace = ?1 AND id = ?2
"""
_END: Final = """
    UPDATE $runs SET status = ?3, outcome = ?4, updated_at = COALESCE(?5, @perdure_at), wake_at = NULL, waiting_for = '[]',
        lease_token = NULL, lease_owner = NULL, lease_until = NULL
    WHERE namespace = ?1 AND id = ?2
"""
_CREATE: Final = f"INSERT INTO $runs (namespace, {', '.join(RUN_FIELDS)}, lease_token, journal_length, inbox_seq) VALUES "
_DELIVER: Final = f"INSERT INTO $signals (namespace, run_id, {SIGNAL_COLUMNS}, identity) VALUES "


def is_otherwise(error: BaseException) -> bool:
    """Whether a packet failed because something is not as it expects, so that nothing was written."""
    return code_of(error) in {_OUT_OF_RANGE, DUPLICATE}


class _At(NamedTuple):
    """An instant that only the server knows: so long after it carries out the packet."""

    after: int

    @property
    def sql(self) -> bytes:
        return b"@perdure_at + %d" % self.after


class Packet:
    """A transaction that is being put together."""

    def __init__(self, tables: Tables, namespace: str, quote: Quote) -> None:
        self._tables = tables
        self._namespace = namespace
        self._quote = quote
        self.statements: list[bytes] = []

    def add(self, template: str, *values: Any) -> None:
        """One statement; `?1` is the namespace."""
        sql, stored = self._tables.statement(template, self._namespace, *values)
        self.statements.append(filled(sql, stored, self._quote))

    def add_rows(self, template: str, rows: Iterable[Sequence[Any]]) -> None:
        """One statement that inserts rows, which get the namespace before them; none if there are none."""
        lines = [b"(%b)" % self._values((self._namespace, *row)) for row in rows]
        if lines:
            self.statements.append(self._tables.statement(template).sql.encode() + b",".join(lines))

    def add_held(self, template: tuple[str, str], names: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """One statement about rows that are given under these names, between the two halves of its template."""
        before, after = template
        first = b", ".join(
            b"%b AS %b" % (self._values([value]), name.encode()) for name, value in zip(names, rows[0], strict=True)
        )
        others = [b" UNION ALL SELECT " + self._values(row) for row in rows[1:]]
        sql, stored = self._tables.statement(after, self._namespace)
        self.statements.append(b"".join([before.encode(), first, *others, filled(sql, stored, self._quote)]))

    def _values(self, row: Sequence[Any]) -> bytes:
        return b",".join([value.sql if isinstance(value, _At) else literal(value, self._quote) for value in row])

    def add_written(self, writes: Sequence[Write]) -> None:
        """What appends, adds and consumes what these writes have."""
        self.add_rows(_APPEND, ([write.run_id, *entry_values(entry)] for write in writes for entry in write.entries))
        self.add_rows(_ADD, ([write.run_id, item.stream, item.n, item.payload] for write in writes for item in write.items))
        for write in writes:
            if write.consume:
                given = Given()
                run_id, mark = given.one(write.run_id), given.one(write.lease.token)
                self.add(_CONSUME.format(mark, run_id, given.many(write.consume)), *given.values)
                self.add(_CONSUMED, len(write.consume))


def record(writes: Sequence[Write], packet: Packet) -> None:
    """What appends what the holders of current leases have written, where nothing is there yet."""
    packet.add_held(_HELD, ("request", "id", "epoch", "token"), _held(writes))
    packet.add_written(writes)


def _held(writes: Sequence[Write]) -> list[tuple[int, str, int, str]]:
    """The leases in the order of their runs: all who lock several do it in this order."""
    held = [(number, write.run_id, write.lease.epoch, write.lease.token) for number, write in enumerate(writes)]
    return sorted(held, key=lambda one: one[1].encode())


def pulses_from(results: Sequence[Result]) -> list[Pulse]:
    """What each write of `record` is answered."""
    return [Pulse(int(inbox_seq), bool(cancel)) for _, inbox_seq, cancel, _ in sorted(results[0].rows, key=itemgetter(0))]


def close(writes: Sequence[Write], packet: Packet) -> None:
    """What records, and ends runs without a parent, or suspends runs for which nothing awaited is there."""
    held = [(*one, writes[one[0]].status == "suspended") for one in _held(writes)]
    packet.add_held(_CLOSABLE, ("request", "id", "epoch", "token", "sleeps"), held)
    packet.add_written(writes)
    packet.add(_TIME)
    for write in writes:
        if write.status == "suspended":
            _sleep(packet, write)
        else:
            packet.add(_END, write.run_id, write.status, write.outcome, write.now)


def _sleep(packet: Packet, write: Write) -> None:
    if write.waiting_for:
        given = Given()
        run_id = given.one(write.run_id)
        awaited = ", ".join(f"({given.many([one.kind, one.name])})" for one in write.waiting_for)
        packet.add(_NONE_WAITS.format(run_id, awaited), *given.values)
    packet.add(_SLEEP, write.run_id, awaited_text(write.waiting_for), write.wake_at, write.now)


def create(begins: Sequence[Begin], packet: Packet) -> None:
    """What creates runs of which none is there."""
    packet.add(_TIME)
    in_order = sorted(begins, key=lambda begin: begin.run.id.encode())
    packet.add_rows(_CREATE, (_row(begin) for begin in in_order))
    packet.add_rows(_APPEND, ([begin.run.id, *entry_values(entry)] for begin in in_order for entry in begin.entries))
    packet.add_rows(_DELIVER, ([begin.run.id, *signal_values(row)] for begin in in_order for row in begin.inbox))
    packet.add(_GIVE_TIME)


def _row(begin: Begin) -> list[Any]:
    run = begin.made(0 if begin.now is None else begin.now).run
    since = _since(begin) if begin.now is None else {}
    row = [_At(since[name]) if name in since else value for name, value in zip(RUN_FIELDS, run_values(run), strict=True)]
    return [*row, None if begin.length is None else begin.token, last_seq(begin.entries), last_seq(begin.inbox)]


def _since(begin: Begin) -> dict[str, int]:
    """Which columns of a new run count from the instant at which it is created, and how long after it they are."""
    since = {"updated_at": 0}
    if begin.created_at is None:
        since["created_at"] = 0
    if begin.length is not None:
        since |= {"epoch": 0, "lease_until": begin.length, "wake_at": begin.length}
    elif begin.run.start_at is None:
        since["wake_at"] = 0
    return since


def created_from(begins: Sequence[Begin], results: Sequence[Result]) -> list[Created]:
    """What each run of `create` became."""
    at = int(results[-1].rows[0][0])
    return [begin.made(at if begin.now is None else begin.now) for begin in begins]

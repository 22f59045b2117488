"""Records of lease holders, many in one transaction.

A record is first sent as statements that do not depend on each other's results (`record_statements`): they lock the rows of the
runs, in id order, which keeps other workers from taking a run over, and append the entries of each write whose lease is current,
if none of its seqs is taken. So a database that takes many statements at once needs one round trip. A write for which that is not
enough (an entry is recorded already, it has inbox rows or items) is then compared with what is recorded, under the same locks;
entries that the first statements appended are found there, and are equal.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

from perdure.backends.base.batching import Reply
from perdure.backends.base.duplicate_records import check_consumed, missing_entries, missing_items, unique_entries, unique_items
from perdure.backends.sql.dialect import Statement, Tables, chunks
from perdure.backends.sql.rows import ENTRY_COLUMNS, ENTRY_FIELDS, entries_from, entry_values
from perdure.backends.sql.session import Parameters, Result, Session
from perdure.errors import LeaseLost, PersistenceError
from perdure.model.journal import Entry
from perdure.model.records import Awaited, EndStatus, Item, Lease, Pulse

# SQLite joins at most 500 SELECTs by UNION ALL, and a statement takes some ten thousand values.
_MAX_ROWS: Final = 250
_TYPES: Final = {"seq": "int", "epoch": "int", "ok": "int", "attempt": "int", "started_at": "int", "took": "int"}

_FENCE: Final = "SELECT id, epoch, lease_token, inbox_seq, cancel_requested FROM $runs WHERE namespace = ?1 AND id IN "


class Write(NamedTuple):
    """A record, or with `status` the end or sleep of a run and what is recorded with it."""

    lease: Lease
    entries: Sequence[Entry] = ()
    consume: Sequence[int] = ()
    items: Sequence[Item] = ()
    status: str | None = None
    outcome: bytes | None = None
    wake_at: int | None = None
    waiting_for: frozenset[Awaited] = frozenset()
    now: int | None = None

    @classmethod
    def record(cls, lease: Lease, entries: Sequence[Entry], consume: Sequence[int], items: Sequence[Item] = ()) -> Write:
        """The write that appends these. Raises `PersistenceError` when two different things have the same number."""
        run_id = lease.run_id
        if len(entries) == 1 and not consume and not items:  # as nearly every record
            return cls(lease, list(entries))
        return cls(lease, unique_entries(run_id, entries), list(dict.fromkeys(consume)), unique_items(run_id, items))

    @classmethod
    def suspend(
        cls,
        lease: Lease,
        wake_at: int | None,
        waiting_for: Collection[Awaited],
        entries: Sequence[Entry],
        consume: Sequence[int],
        now: int | None,
    ) -> Write:
        """The write that records, and gives up the lease unless an awaited inbox row has arrived."""
        write = cls.record(lease, entries, consume)
        return write._replace(status="suspended", wake_at=wake_at, waiting_for=frozenset(waiting_for), now=now)

    @classmethod
    def finish(
        cls, lease: Lease, status: EndStatus, outcome: bytes, entries: Sequence[Entry], consume: Sequence[int], now: int | None
    ) -> Write:
        """The write that records, ends the run and notifies its parent."""
        return cls.record(lease, entries, consume)._replace(status=status, outcome=outcome, now=now)

    @property
    def run_id(self) -> str:
        """The id of the run that is written."""
        return self.lease.run_id

    @property
    def written_rows(self) -> list[Hashable]:
        """The rows it writes: places in a journal and in streams, or the run's row."""
        if self.status is not None:
            return [self.run_id]
        entries = [(self.run_id, entry.seq) for entry in self.entries]
        return [*entries, *((self.run_id, item.stream, item.n) for item in self.items)]

    @property
    def size(self) -> int:
        """About how many bytes it has."""
        payloads = sum(len(entry.payload) for entry in self.entries) + sum(len(item.payload) for item in self.items)
        return payloads + len(self.outcome or b"") + 200


class _Compare(enum.Enum):
    COMPARE = "COMPARE"


COMPARE: Final = _Compare.COMPARE  # the write has to be compared with what is recorded; nothing of it, or all of it, was written
FirstReply: TypeAlias = Pulse | LeaseLost | _Compare


def record_statements(tables: Tables, namespace: str, writes: Sequence[Write]) -> list[Statement]:
    """The statements that lock and append, in one transaction. `first_replies` reads their results."""
    params = Parameters()
    template = f"{_FENCE}({params.many(sorted({write.run_id for write in writes}))}) ORDER BY id $for_share"
    appending = [_append_held(tables, namespace, rows) for rows in _whole_writes(writes)]
    return [tables.statement(template, namespace, *params.values), *appending]


def _whole_writes(writes: Sequence[Write]) -> list[list[list[Any]]]:
    """The rows to append, in lists that are short enough for a statement. All rows of a write are in one of them."""
    groups: list[list[list[Any]]] = []
    for write in writes:
        rows = _rows_to_append(write) if _is_plain(write) else []
        if not groups or len(groups[-1]) + len(rows) > _MAX_ROWS:
            groups.append([])
        groups[-1] += rows
    return [group for group in groups if group]


def first_replies(tables: Tables, writes: Sequence[Write], results: Sequence[Result]) -> list[FirstReply]:
    """The reply to each write, from the results of `record_statements`; `COMPARE` sends it to `compare_and_record`."""
    fences = fences_from(tables, results[0])
    current = [write for write in writes if is_current(fences, write.lease)]
    expected = sum(len(write.entries) for write in current if _is_plain(write))
    is_complete = sum(result.count for result in results[1:]) == expected
    return [_first_reply(fences, write, is_complete=is_complete) for write in writes]


def _first_reply(fences: Fences, write: Write, *, is_complete: bool) -> FirstReply:
    if not is_current(fences, write.lease):
        return LeaseLost(write.run_id, write.lease.epoch)
    is_written = _is_plain(write) and (is_complete or not write.entries)
    return fences[write.run_id][2] if is_written else COMPARE


# By run: epoch, token, and the pulse of its holder.
Fences: TypeAlias = dict[str, tuple[int, str | None, Pulse]]


def fences_from(tables: Tables, locked: Result) -> Fences:
    """The rows of the fence by run."""
    name = tables.values.name_from
    return {
        name(run_id): (int(epoch), None if token is None else name(token), Pulse(int(inbox_seq), bool(cancel_requested)))
        for run_id, epoch, token, inbox_seq, cancel_requested in locked.rows
    }


def is_current(fences: Fences, lease: Lease) -> bool:
    """Whether this lease is the run's present one."""
    found = fences.get(lease.run_id)
    return found is not None and found[:2] == (lease.epoch, lease.token)


def _is_plain(write: Write) -> bool:
    return not write.consume and not write.items and len(write.entries) <= _MAX_ROWS


def _rows_to_append(write: Write) -> list[list[Any]]:
    if not write.entries:
        return []
    seqs = [entry.seq for entry in write.entries]
    of_write = [write.run_id, write.lease.epoch, write.lease.token, min(seqs), max(seqs)]
    return [[*of_write, *entry_values(entry)] for entry in write.entries]


_APPENDED_COLUMNS: Final = [
    ("run_id", "text"), ("held_epoch", "int"), ("token", "text"), ("low", "int"), ("high", "int"),
    *((f"a_{field}", _TYPES.get(field, "text")) for field in ENTRY_FIELDS),
]  # fmt: skip
_APPENDED_FIELDS: Final = ", ".join(f"appended.a_{field}" for field in ENTRY_FIELDS)


def _append_held(tables: Tables, namespace: str, rows: Sequence[Sequence[Any]]) -> Statement:
    """The statement that appends rows of writes whose lease is current and none of whose seqs is taken."""
    params = Parameters()
    template = f"""
        INSERT INTO $steps (namespace, run_id, {ENTRY_COLUMNS})
        SELECT run.namespace, appended.run_id, {_APPENDED_FIELDS}
        FROM {_table(tables, params, rows)}
        JOIN $runs AS run ON run.namespace = ?1 AND run.id = appended.run_id
            AND run.epoch = appended.held_epoch AND run.lease_token = appended.token
        WHERE NOT EXISTS (
            SELECT 1 FROM $steps AS there WHERE there.namespace = ?1 AND there.run_id = appended.run_id
                AND there.seq >= appended.low AND there.seq <= appended.high
        )
    """
    return tables.statement(template, namespace, *params.values)


def _table(tables: Tables, params: Parameters, rows: Sequence[Sequence[Any]]) -> str:
    """The rows as a table `appended`."""
    places = [[params.one(value, kind) for value, (_, kind) in zip(row, _APPENDED_COLUMNS, strict=True)] for row in rows]
    names = [name for name, _ in _APPENDED_COLUMNS]
    if tables.dialect.name == "postgres":  # which plans each SELECT of a union by itself
        lines = ", ".join(f"({', '.join(row)})" for row in places)
        return f"(VALUES {lines}) AS appended ({', '.join(names)})"
    selects = (", ".join(f"{place} AS {name}" for place, name in zip(row, names, strict=True)) for row in places)
    return f"({' UNION ALL '.join(f'SELECT {select}' for select in selects)}) AS appended"


async def record_all(db: Session, writes: Sequence[Write]) -> list[Reply[Pulse]]:
    """Append these writes; one that is refused gets its error as reply, alone."""
    results = await db.send(record_statements(db.tables, db.namespace, writes))
    replies = first_replies(db.tables, writes, results)
    unsettled = [write for write, reply in zip(writes, replies, strict=True) if reply is COMPARE]
    compared = iter(await compare_and_record(db, unsettled) if unsettled else ())
    return [next(compared) if reply is COMPARE else reply for reply in replies]


async def compare_and_record(db: Session, writes: Sequence[Write]) -> list[Reply[Pulse]]:
    """As `record_all`, for writes of any kind: what is recorded is read and compared before anything is written."""
    fences = await fence(db, [write.lease for write in writes])
    replies: list[Reply[Pulse]] = []
    for write in writes:  # one after the other: two may be of one run
        if not is_current(fences, write.lease):
            replies.append(LeaseLost(write.run_id, write.lease.epoch))
            continue
        refused = await write_all(db, [write])
        replies.append(refused.get(write.run_id, fences[write.run_id][2]))
    return replies


async def fence(db: Session, leases: Iterable[Lease]) -> Fences:
    """The fences of the runs of these leases, locked until the transaction ends."""
    params = Parameters()
    template = f"{_FENCE}({params.many(sorted({lease.run_id for lease in leases}))}) ORDER BY id $for_share"
    (result,) = await db.send([db.statement(template, *params.values)])
    return fences_from(db.tables, result)


async def write_all(db: Session, writes: Sequence[Write]) -> dict[str, PersistenceError]:
    """Append, consume and add what these writes have, each of another run that is locked. Returns refusals by run.

    Rows that are recorded already and equal are left alone.
    """
    recorded = await _read_recorded(db, writes)
    refused: dict[str, PersistenceError] = {}
    entries: list[tuple[str, Entry]] = []
    items: list[list[Any]] = []
    consuming: list[Statement] = []
    for write in writes:
        run_id = write.run_id
        found = recorded[run_id]
        try:
            new_entries = missing_entries(run_id, found.entries, write.entries)
            new_items = missing_items(run_id, found.items, write.items)
            check_consumed(run_id, found.inbox, write.consume)
        except PersistenceError as error:
            refused[run_id] = error
            continue
        entries += [(run_id, entry) for entry in new_entries.values()]
        items += [[db.namespace, run_id, item.stream, item.n, item.payload] for item in new_items.values()]
        consuming += [_consume(db, write)] if write.consume else []
    await db.send([*append(db, entries), *consuming, *insert_rows(db, "$items", "run_id, stream, n, payload", items)])
    return refused


def append(db: Session, entries: Sequence[tuple[str, Entry]]) -> list[Statement]:
    """The statements that insert these entries of these runs, whose seqs are free."""
    rows = [[db.namespace, run_id, *entry_values(entry)] for run_id, entry in entries]
    return insert_rows(db, "$steps", f"run_id, {ENTRY_COLUMNS}", rows)


def insert_rows(db: Session, table: str, columns: str, rows: Sequence[Sequence[Any]]) -> list[Statement]:
    """The statements that insert rows, which begin with the namespace."""
    statements = []
    for chunk in chunks(rows, _MAX_ROWS):
        params = Parameters()
        lines = ", ".join(f"({params.many(row)})" for row in chunk)
        statements.append(db.statement(f"INSERT INTO {table} (namespace, {columns}) VALUES {lines}", *params.values))
    return statements


def _consume(db: Session, write: Write) -> Statement:
    params = Parameters()
    mark, run_id = params.one(write.lease.token), params.one(write.run_id)
    template = f"""
        UPDATE $signals SET consumed_by = {mark}
        WHERE namespace = ?1 AND run_id = {run_id} AND seq IN ({params.many(write.consume)}) AND consumed_by IS NULL
    """
    return db.statement(template, *params.values)


@dataclass(slots=True)
class _RecordedRows:
    """The rows of one run that are written already under the numbers of a write."""

    entries: dict[int, Entry] = field(default_factory=dict)
    items: dict[tuple[str, int], Item] = field(default_factory=dict)
    inbox: set[int] = field(default_factory=set)


async def _read_recorded(db: Session, writes: Sequence[Write]) -> dict[str, _RecordedRows]:
    """By run, the rows under the numbers of these writes."""
    recorded = {write.run_id: _RecordedRows() for write in writes}
    name, payload = db.tables.values.name_from, db.tables.values.payload_from
    rows = await _at(db, f"{ENTRY_COLUMNS}, run_id FROM $steps", {w.run_id: _seqs(w.entries) for w in writes})
    for row, entry in zip(rows, entries_from(rows, db.tables.values), strict=True):
        recorded[name(row[-1])].entries[entry.seq] = entry
    for run_id, seq in await _at(db, "run_id, seq FROM $signals", {w.run_id: list(w.consume) for w in writes}):
        recorded[name(run_id)].inbox.add(int(seq))
    for run_id, stream, n, found in await _items_at(db, writes):
        item = Item(stream=name(stream), n=int(n), payload=payload(found))
        recorded[name(run_id)].items[item.stream, item.n] = item
    return recorded


def _seqs(entries: Iterable[Entry]) -> list[int]:
    return [entry.seq for entry in entries]


async def _at(db: Session, selected: str, places: dict[str, list[int]]) -> list[Sequence[Any]]:
    """The rows with these seqs of these runs."""
    rows: list[Sequence[Any]] = []
    pairs = [(run_id, chunk) for run_id, seqs in places.items() for chunk in chunks(seqs, _MAX_ROWS)]
    for chunk in chunks(pairs, _MAX_ROWS):
        params = Parameters()
        # With the namespace in each part of it: SQLite looks up the parts of an OR for themselves, by a whole key or not at all.
        wanted = " OR ".join(
            f"(namespace = ?1 AND run_id = {params.one(run_id)} AND seq IN ({params.many(seqs)}))" for run_id, seqs in chunk
        )
        rows += await db.all(f"SELECT {selected} WHERE {wanted}", *params.values)
    return rows


async def _items_at(db: Session, writes: Sequence[Write]) -> list[Sequence[Any]]:
    rows: list[Sequence[Any]] = []
    places = [(write.run_id, item) for write in writes for item in write.items]
    for chunk in chunks(places, _MAX_ROWS):
        params = Parameters()
        wanted = " OR ".join(
            "(namespace = ?1 AND run_id = {} AND stream = {} AND n = {})".format(*map(params.one, (run_id, item.stream, item.n)))
            for run_id, item in chunk
        )
        template = f"SELECT run_id, stream, n, payload FROM $items WHERE {wanted}"
        rows += await db.all(template, *params.values)
    return rows


_REPORT: Final = """
    UPDATE $runs SET progress = ?5 WHERE namespace = ?1 AND id = ?2 AND epoch = ?3 AND lease_token = ?4
"""


async def report(db: Session, lease: Lease, progress: bytes) -> None:
    """Replace the run's progress."""
    if not await db.run(_REPORT, lease.run_id, lease.epoch, lease.token, progress):
        raise LeaseLost(lease.run_id, lease.epoch)

"""What differs between PostgreSQL, MySQL or MariaDB, and SQLite, as values; and templates filled for one of them.

The verbs are written once, as templates: `$runs` is the quoted name of a table, `$for_update` and the like are words of the
dialect, and `?1` is a bound value (`?2:int` says its type where PostgreSQL could not find it out by itself). Templates are made
of constants only, and `Tables` is the one place where a name becomes part of SQL: every value from outside is bound.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from perdure.backends.sql.rows import Values

Name: TypeAlias = Literal["postgres", "mysql", "sqlite"]


@dataclass(frozen=True, slots=True)
class Dialect:
    """A kind of SQL.

    `words` are put into templates as they are. Locks on the rows of a SELECT: `for_update` takes a run over and keeps out
    every other lock, `for_change` changes its row in other ways, and `for_share` writes to a run and only keeps it from being
    taken over; `skip_locked` after them skips rows that others have locked. `insert_new` and `or_nothing`
    enclose an INSERT that leaves alone what is there. `clock` is the server's time in microseconds, and goes on within a
    transaction. `may_wake` and `unconsumed` pick the rows that time may make due and the inbox rows that wait, by an index that
    has only those; `by_wake` and `by_unconsumed` insist on it. `is_started` is 1 for a run that was leased before, else 0, as the
    index of `by_wake` has it. `by_changed` and `by_workflow` insist on the indexes of lists. `indexed_namespace` is the namespace
    where runs are looked for by other columns than their id, `due_namespace` and `changed_namespace` where they may be of any
    workflow: due ones, and those in a status; `listed_namespace` in lists by workflow and queue. `each_of` and what follows it
    join rows of a table `here`, looked up one by one. `unindexed` before a column keeps the planner from choosing an index for
    it. `payload` is the type of a payload's column, and `instr` the function that says where a payload contains a part, from 1.

    Where it `has_few_indexes`, no index of the runs begins with their status or `wake_at`: lists go by (workflow, queue, status),
    what is due goes by (workflow, queue, priority), and each of these groups is looked up for itself.
    """

    name: Name
    label: str
    quote: str
    placeholder: Callable[[int], str]
    words: Mapping[str, str]
    # Says whether there is a table called ?1.
    has_table: str
    # What a transaction does first to be the only one that sets up the tables whose stem is ?1; what it does last.
    lock_setup: str = ""
    unlock_setup: str = ""
    types: Mapping[str, str] = field(default_factory=dict)
    longest_stem: int = 45
    # What creates the indexes that are not in the file with the tables.
    indexes: tuple[str, ...] = ()
    has_few_indexes: bool = False
    # Whether a list can be bound as one value.
    takes_lists: bool = False

    @property
    def schema(self) -> str:
        """The file with the tables."""
        return f"{self.name}.sql"


POSTGRES: Final = Dialect(
    name="postgres",
    label="PostgreSQL",
    quote='"',
    placeholder=lambda number: f"${number}",
    types={"int": "::bigint", "text": "::text", "texts": "::text[]"},
    words={
        "for_update": "FOR UPDATE",
        "for_change": "FOR NO KEY UPDATE",
        "for_share": "FOR KEY SHARE",
        "skip_locked": "SKIP LOCKED",
        "insert_new": "INSERT",
        "or_nothing": "ON CONFLICT DO NOTHING",
        "may_wake": "wake_at IS NOT NULL AND held = 0",
        "by_wake": "",
        "is_started": "(epoch > 0)::int",
        # The expressions of the indexes in postgres.sql, which says why they are what they are.
        "indexed_namespace": "namespace || ''",
        "due_namespace": "namespace || '' || ''",
        "changed_namespace": "'' || namespace",
        "listed_namespace": "'' || namespace || ''",
        "by_changed": "",
        "by_workflow": "",
        "unindexed": "",
        "unconsumed": "consumed_by IS NULL",
        "by_unconsumed": "",
        # Quoted, it is a function of (text, text) and of (bytea, bytea), and has the arguments of the others' instr.
        "instr": 'pg_catalog."position"',
        "payload": "text",
        "clock": "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint",
        # The planner expects very many rows of a recursion, and would read the whole table for a plain join.
        "each_of": "CROSS JOIN LATERAL (SELECT here.* FROM",
        "each_where": "WHERE",
        "each_end": "OFFSET 0) AS here",
    },
    # Not to_regclass(): inside a transaction that remembers what it did not find before it waited for the lock.
    has_table="SELECT count(*) FROM pg_class WHERE relname = ?1 AND pg_table_is_visible(oid)",
    lock_setup="SELECT pg_advisory_xact_lock(hashtextextended('perdure ' || ?1, 0))",
)

MYSQL: Final = Dialect(
    name="mysql",
    label="MySQL",
    quote="`",
    placeholder=lambda _: "%s",
    words={
        "for_update": "FOR UPDATE",
        "for_change": "FOR UPDATE",
        "for_share": "LOCK IN SHARE MODE",
        "skip_locked": "SKIP LOCKED",
        # It also truncates values that are too long for their column, so lengths are checked before.
        "insert_new": "INSERT IGNORE",
        "or_nothing": "",
        # It has no partial indexes; these columns are NULL where there is nothing to find.
        "may_wake": "may_wake = 1",
        "by_wake": "FORCE INDEX ($runs_wake)",
        "is_started": "is_started",
        # It would take the primary key, which begins with the namespace too, and read all runs.
        "by_changed": "FORCE INDEX ($runs_changed)",
        "by_workflow": "FORCE INDEX ($runs_of_workflow)",
        "indexed_namespace": "namespace",
        "due_namespace": "namespace",
        "changed_namespace": "namespace",
        "listed_namespace": "namespace",
        "unindexed": "",
        "unconsumed": "unconsumed = 1",
        "by_unconsumed": "",
        "instr": "INSTR",
        "each_of": "JOIN",
        "each_where": "ON",
        "each_end": "",
        # Of the statement, not of the transaction; in UTC, where no hour comes twice.
        "clock": "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))",
    },
    has_table="SELECT count(*) FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name = ?1",
    # It commits at every CREATE TABLE, so the lock must be the session's.
    lock_setup="SELECT GET_LOCK(CONCAT('perdure ', ?1), 60)",
    unlock_setup="SELECT RELEASE_LOCK(CONCAT('perdure ', ?1))",
)

# What SQLite's PRAGMA synchronous gives for FULL.
SYNCHRONOUS_FULL: Final = 2

SQLITE: Final = Dialect(
    name="sqlite",
    label="SQLite",
    quote='"',
    placeholder=lambda _: "?",
    words={
        # A transaction that writes is alone: it begins with BEGIN IMMEDIATE.
        "for_update": "",
        "for_change": "",
        "for_share": "",
        "skip_locked": "",
        "insert_new": "INSERT",
        "or_nothing": "ON CONFLICT DO NOTHING",
        "may_wake": "wake_at IS NOT NULL AND held = 0",
        "by_wake": "",
        "is_started": "(epoch > 0)",
        "by_changed": "",
        "by_workflow": "",
        "indexed_namespace": "namespace",
        "due_namespace": "namespace",
        "changed_namespace": "namespace",
        "listed_namespace": "namespace",
        "unindexed": "+",
        "unconsumed": "consumed_by IS NULL",
        # It would take the primary key for the order, and read the rows that were consumed.
        "by_unconsumed": "INDEXED BY $signals_waiting",
        "instr": "instr",
        # Its clock has whole milliseconds; the fraction of a day has them only about.
        "clock": "CAST(round((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER) * 1000",
        "each_of": "JOIN",
        "each_where": "ON",
        "each_end": "",
    },
    has_table="SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = ?1 COLLATE NOCASE",
    indexes=(
        """
        CREATE INDEX $runs_due ON $runs (namespace, wake_at, id, held)
        WHERE wake_at IS NOT NULL AND held = 0
        """,
        """
        CREATE INDEX $runs_leased ON $runs (namespace, queue, lease_until, limit_key)
        WHERE lease_until IS NOT NULL
        """,
        "CREATE INDEX $runs_changed ON $runs (namespace, status, updated_at DESC, id)",
        "CREATE INDEX $runs_of_workflow ON $runs (namespace, workflow, queue, status, updated_at DESC, id)",
    ),
)

# A file that this process has opened itself. A statement costs no round trip, but every index more is another page to write for
# each run that is created, claimed or ended. Leases are looked up by owner, since they end with their process.
SQLITE_FILE: Final = replace(
    SQLITE,
    longest_stem=63,
    has_few_indexes=True,
    indexes=(
        """
        CREATE INDEX $runs_leased ON $runs (namespace, lease_owner, queue, limit_key, lease_until)
        WHERE lease_until IS NOT NULL
        """,
        "CREATE INDEX $runs_changed ON $runs (namespace, workflow, queue, status, updated_at DESC, id)",
    ),
)

DIALECTS: Final[Mapping[str, Dialect]] = {dialect.name: dialect for dialect in (POSTGRES, MYSQL, SQLITE)}


def dialect_named(name: str) -> Dialect:
    """The dialect. Raises `ValueError`."""
    if name not in DIALECTS:
        raise ValueError(f"dialect {name!r} must be one of {', '.join(map(repr, DIALECTS))}")
    return DIALECTS[name]


TABLES: Final = ("runs", "steps", "signals", "queues", "schedules", "items", "workers", "meta", "snapshots")
_INDEXES: Final = (
    "runs_wake",
    "runs_due",
    "runs_leased",
    "runs_changed",
    "runs_of_workflow",
    "signals_identity",
    "signals_waiting",
    "snapshots_due",
)
_NAME: Final = re.compile(r"\$([a-z_]+)")
_PLACE: Final = re.compile(r"\?(\d+)(?::(int|texts?))?")
_IDENTIFIER: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Statement(NamedTuple):
    """SQL as the database takes it, and the values in the order of its placeholders."""

    sql: str
    values: tuple[Any, ...] = ()


class _FilledTemplate(NamedTuple):
    sql: str
    order: tuple[int, ...]


class Tables:
    """The tables under one stem, in one dialect: fills templates."""

    def __init__(self, stem: str, dialect: Dialect, values: Values) -> None:
        longest = dialect.longest_stem
        is_word = isinstance(stem, str) and _IDENTIFIER.fullmatch(stem) is not None and len(stem) <= longest
        if not is_word or stem.lower().startswith("sqlite_"):
            raise ValueError(f"table {stem!r} must be letters, digits and '_', at most {longest}, and not begin with a digit")
        self.stem = stem
        self.dialect = dialect
        self.values = values
        quote = dialect.quote
        names = {part: f"{quote}{stem}_{part}{quote}" for part in (*TABLES, *_INDEXES)}
        words = {word: _NAME.sub(lambda found: names[found[1]], sql) for word, sql in dialect.words.items()}
        self._words = {**words, **names, "key": f"{quote}key{quote}"}
        self._fill: Callable[[str], _FilledTemplate] = lru_cache(maxsize=1000)(self._fill_anew)

    def sql(self, template: str) -> str:
        """The template as SQL, for values that are given in the order of its placeholders."""
        return self._fill(template).sql

    def statement(self, template: str, *values: Any) -> Statement:
        """The statement for these values: `str` is a name, `bytes` is a payload."""
        sql, order = self._fill(template)
        stored = [self._encode(value) for value in values]
        return Statement(sql, tuple(stored[place] for place in order))

    def _encode(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.values.name(value)
        if isinstance(value, bytes):
            return self.values.payload(value)
        return int(value) if isinstance(value, bool) else value

    def _fill_anew(self, template: str) -> _FilledTemplate:
        sql = _NAME.sub(lambda found: self._words[found[1]], template)
        places: list[int] = []
        is_numbered = self.dialect.placeholder(1) != self.dialect.placeholder(2)

        def put(found: re.Match[str]) -> str:
            place = int(found[1]) - 1
            if not is_numbered:
                places.append(place)
                return self.dialect.placeholder(place)
            if place not in places:
                places.append(place)
            return self.dialect.placeholder(places.index(place) + 1) + self.dialect.types.get(found[2] or "", "")

        return _FilledTemplate(_PLACE.sub(put, sql), tuple(places))


def chunks(rows: Sequence[Any], size: int) -> list[Sequence[Any]]:
    """The rows in lists of at most `size`: a statement takes only so many values."""
    return [rows[start : start + size] for start in range(0, len(rows), size)]

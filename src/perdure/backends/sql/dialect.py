"""What differs between PostgreSQL, MySQL or MariaDB, and SQLite, as values.

The verbs are written once, as templates: `$runs` is the quoted name of a table, `$for_update` and the like are words of the
dialect, and `?1` is a bound value (`?2:int` says its type where PostgreSQL could not find it out by itself).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeAlias

Name: TypeAlias = Literal["postgres", "mysql", "sqlite"]


@dataclass(frozen=True, slots=True)
class Dialect:
    """A kind of SQL.

    `words` are put into templates as they are. Locks on what a SELECT gives: `for_update` is for who takes a run over and keeps
    everybody out, `for_change` is for who changes its row in other ways, and `for_share` for who writes to a run and only keeps
    its row from being taken over; `skip_locked` after them passes over what others have locked. `insert_new` and `or_nothing`
    enclose an INSERT that leaves alone what is there. `clock` is the server's time in microseconds, and goes on within a
    transaction. `may_wake` and `unconsumed` pick the rows that time may make due and the inbox rows that wait, by an index that
    has only those; `by_wake` and `by_unconsumed` insist on it. `indexed_namespace` is the namespace where runs are looked for by
    other columns than their id, `due_namespace` where they may be of any workflow. `each_of` and what follows it join rows of a
    table `here`, looked up one by one. `unindexed` before a column keeps the planner from choosing an index for it. `payload` is
    the type of a payload's column.

    Where it `has_few_indexes`, no index of the runs begins with their status or `wake_at`: lists go by (workflow, status) and
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
        # The expressions of the indexes in postgres.sql, which says why they are what they are.
        "indexed_namespace": "namespace || ''",
        "due_namespace": "namespace || '' || ''",
        "unindexed": "",
        "unconsumed": "consumed_by IS NULL",
        "by_unconsumed": "",
        "payload": "text",
        "clock": "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint",
        # It thinks that a recursion gives very many rows, and would read the table as a whole for a plain join.
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
        # It would also cut what is too long for its column: what goes there is checked before.
        "insert_new": "INSERT IGNORE",
        "or_nothing": "",
        # It has no partial indexes; these columns are NULL where there is nothing to find.
        "may_wake": "may_wake = 1",
        "by_wake": "FORCE INDEX ($runs_wake)",
        "indexed_namespace": "namespace",
        "due_namespace": "namespace",
        "unindexed": "",
        "unconsumed": "unconsumed = 1",
        "by_unconsumed": "",
        # Of the statement, not of the transaction; in UTC, where no hour comes twice.
        "clock": "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))",
    },
    has_table="SELECT count(*) FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name = ?1",
    # It commits at every CREATE TABLE, so the lock must be the session's.
    lock_setup="SELECT GET_LOCK(CONCAT('perdure ', ?1), 60)",
    unlock_setup="SELECT RELEASE_LOCK(CONCAT('perdure ', ?1))",
)

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
        "indexed_namespace": "namespace",
        "due_namespace": "namespace",
        "unindexed": "+",
        "unconsumed": "consumed_by IS NULL",
        # It would take the primary key for the order, and read the rows that were consumed.
        "by_unconsumed": "INDEXED BY $signals_waiting",
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
        "CREATE INDEX $runs_of_workflow ON $runs (namespace, workflow, status, updated_at DESC, id)",
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
        "CREATE INDEX $runs_changed ON $runs (namespace, workflow, status, updated_at DESC, id)",
    ),
)

DIALECTS: Final[Mapping[str, Dialect]] = {dialect.name: dialect for dialect in (POSTGRES, MYSQL, SQLITE)}


def dialect_named(name: str) -> Dialect:
    """The dialect. Raises `ValueError`."""
    if name not in DIALECTS:
        raise ValueError(f"dialect {name!r} must be one of {', '.join(map(repr, DIALECTS))}")
    return DIALECTS[name]

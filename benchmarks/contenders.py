"""Who takes part. Each is a module with a `PROGRAM`, run as a process of its own."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

Kind = Literal["sqlite", "postgres", "nowhere"]


class Contender(msgspec.Struct, frozen=True):
    """A program and where it keeps its data. A peer needs what only the environment of `make bench` has."""

    module: str
    kind: Kind
    is_peer: bool = False


CONTENDERS: Final = {
    "perdure without a store": Contender("benchmarks.programs.perdure_in_memory", "nowhere"),
    "bare await": Contender("benchmarks.programs.bare_await", "nowhere"),
    "interpreter": Contender("benchmarks.programs.importing", "nowhere"),
    "perdure on SQLite": Contender("benchmarks.programs.perdure_with_store", "sqlite"),
    "plain sqlite3": Contender("benchmarks.programs.plain_sqlite", "sqlite"),
    "DBOS on SQLite": Contender("benchmarks.peers.dbos_peer", "sqlite", is_peer=True),
    "LangGraph on SQLite": Contender("benchmarks.peers.langgraph_peer", "sqlite", is_peer=True),
    "perdure on PostgreSQL": Contender("benchmarks.programs.perdure_with_store", "postgres"),
    "plain asyncpg": Contender("benchmarks.programs.plain_asyncpg", "postgres"),
    "DBOS on PostgreSQL": Contender("benchmarks.peers.dbos_peer", "postgres", is_peer=True),
    "absurd on PostgreSQL": Contender("benchmarks.peers.absurd_peer", "postgres", is_peer=True),
    "perdure's queue on SQLite": Contender("benchmarks.programs.perdure_queue", "sqlite"),
    "DBOS's queue on SQLite": Contender("benchmarks.peers.dbos_queue", "sqlite", is_peer=True),
    "perdure's queue on PostgreSQL": Contender("benchmarks.programs.perdure_queue", "postgres"),
    "DBOS's queue on PostgreSQL": Contender("benchmarks.peers.dbos_queue", "postgres", is_peer=True),
    "absurd's queue on PostgreSQL": Contender("benchmarks.peers.absurd_queue", "postgres", is_peer=True),
    "procrastinate on PostgreSQL": Contender("benchmarks.peers.procrastinate_queue", "postgres", is_peer=True),
}
# The distributions whose versions a comparison depends on. One that is not installed takes no part.
DISTRIBUTIONS: Final = (
    "perdure", "msgspec", "asyncpg", "dbos", "sqlalchemy", "psycopg", "langgraph", "langgraph-checkpoint-sqlite", "aiosqlite",
    "absurd-sdk", "absurdctl", "procrastinate",
)  # fmt: skip

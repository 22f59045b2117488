"""Damage to one stored value of a run, made behind the store's back, and mended again.

A `Damage` names a part of a run (its row, an entry of its journal, a row of its inbox), a column, and what stands there instead.
A vandal writes that through a plain client of the database. Not every database can hold every damage: one with typed columns
refuses text in a number, and one that checks its text refuses bytes that are none. `damages` lists those it can hold.
"""

from __future__ import annotations

import asyncio
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias
from urllib.parse import unquote, urlsplit

import msgspec
from obstore.store import S3Store

from perdure.backends.base.dsn import split_options
from perdure.backends.key_value.keys import run_name
from tests.backends.operators import LibsqlOperator, MysqlOperator, PostgresOperator, SqlOperator
from tests.backends.registry import Backend
from tests.servers import s3

Part: TypeAlias = Literal["runs", "steps", "signals"]
# bytes: not text, where text belongs. int: a number out of all bounds. str: text that says nothing, or where a number belongs.
Wrong: TypeAlias = bytes | int | str

NO_TEXT: Final = b"\xff\xfe{"
HUGE: Final = 2**62
LARGEST: Final = 2**63 - 1
NUMBERS: Final = frozenset({
    "epoch", "attempts", "created_at", "updated_at", "wake_at", "deadline", "problem_count", "inbox_seq", "journal_length",
    "version", "priority", "started_at", "took", "attempt",
})  # fmt: skip
PAYLOADS: Final = frozenset({"input", "metadata", "seed", "payload"})


class Damage(NamedTuple):
    part: Part
    column: str
    wrong: Wrong

    @property
    def run_id(self) -> str:
        """The id of the run that gets this damage."""
        kind = {bytes: "bytes", int: "number", str: "text"}[type(self.wrong)]
        return f"{self.part}-{self.column}-{kind}" + (f"-{self.wrong}" if isinstance(self.wrong, int) else "")


DAMAGES: Final = (
    Damage("runs", "status", "runnjng"),
    Damage("runs", "status", NO_TEXT),
    Damage("runs", "epoch", "x"),
    Damage("runs", "epoch", -5),
    Damage("runs", "epoch", LARGEST),
    Damage("runs", "attempts", "x"),
    Damage("runs", "attempts", -3),
    Damage("runs", "attempts", HUGE),
    Damage("runs", "waiting_for", "{"),
    Damage("runs", "waiting_for", NO_TEXT),
    Damage("runs", "definition_hash", NO_TEXT),
    Damage("runs", "parent_id", NO_TEXT),
    Damage("runs", "limit_key", NO_TEXT),
    Damage("runs", "problem", NO_TEXT),
    Damage("runs", "problem_count", "x"),
    Damage("runs", "lease_owner", NO_TEXT),
    Damage("runs", "created_at", "x"),
    Damage("runs", "created_at", HUGE),
    Damage("runs", "updated_at", "x"),
    Damage("runs", "updated_at", HUGE),
    Damage("runs", "deadline", "x"),
    Damage("runs", "deadline", HUGE),
    Damage("runs", "inbox_seq", "x"),
    Damage("runs", "journal_length", "x"),
    Damage("runs", "wake_at", "x"),
    Damage("runs", "wake_at", HUGE),
    Damage("runs", "version", "x"),
    Damage("runs", "priority", "x"),
    Damage("runs", "queue", NO_TEXT),
    Damage("runs", "workflow", NO_TEXT),
    Damage("runs", "input", NO_TEXT),
    Damage("runs", "seed", "x"),
    Damage("steps", "key", NO_TEXT),
    Damage("steps", "kind", "stfp"),
    Damage("steps", "phase", NO_TEXT),
    Damage("steps", "started_at", "x"),
    Damage("steps", "started_at", HUGE),
    Damage("steps", "payload", NO_TEXT),
    Damage("signals", "name", NO_TEXT),
    Damage("signals", "kind", "signbl"),
)


class Vandal(ABC):
    """Damages runs at one place. What `replace` gives is what stood there, for `replace` to mend it with."""

    @abstractmethod
    def damages(self) -> Sequence[Damage]:
        """The damages that this database can hold."""

    @abstractmethod
    def replace(self, run_id: str, part: Part, column: str, value: Any) -> Any:
        """Put the value in place of what is there, and give that."""


def _key(part: Part) -> str:
    return "id" if part == "runs" else "run_id"


def _first(part: Part) -> str:
    return "" if part == "runs" else " AND seq = 1"


class SqliteVandal(Vandal):
    """A file takes every value in every column."""

    def __init__(self, dsn: str) -> None:
        self._path = unquote(dsn.removeprefix("sql_client+").removeprefix("sqlite:///"))
        self._has_client = dsn.startswith("sql_client+")

    def damages(self) -> Sequence[Damage]:
        """All; but a program's client fails a whole list for text that is none in one of its columns."""
        lists = {"status", "limit_key", "problem", "queue", "workflow"} if self._has_client else set()
        return [damage for damage in DAMAGES if not (isinstance(damage.wrong, bytes) and damage.column in lists)]

    def replace(self, run_id: str, part: Part, column: str, value: Any) -> Any:
        connection = sqlite3.connect(self._path)
        connection.text_factory = bytes
        at = f"WHERE {_key(part)} = ?{_first(part)}"
        try:
            with connection:
                ((kind, before),) = connection.execute(
                    f'SELECT typeof("{column}"), "{column}" FROM perdure_{part} {at}', (run_id,)
                ).fetchall()
                is_text = isinstance(value, tuple) or (isinstance(value, bytes) and column not in PAYLOADS)
                stored = value[0] if isinstance(value, tuple) else value
                place = "CAST(? AS TEXT)" if is_text else "?"
                connection.execute(f'UPDATE perdure_{part} SET "{column}" = {place} {at}', (stored, run_id))
            return (before,) if kind == b"text" else before
        finally:
            connection.close()


class SqlVandal(Vandal):
    """A server with typed columns."""

    def __init__(self, dsn: str, operator: SqlOperator, quote: str) -> None:
        self._dsn = dsn.removeprefix("sql_client+")
        self._operator = operator
        self._quote = quote

    def damages(self) -> Sequence[Damage]:
        return [
            damage
            for damage in DAMAGES
            if not (damage.column in NUMBERS and isinstance(damage.wrong, str)) and self.holds(damage)
        ]

    def holds(self, damage: Damage) -> bool:
        return True

    def replace(self, run_id: str, part: Part, column: str, value: Any) -> Any:
        return asyncio.run(self._replace(run_id, part, column, value))

    async def _replace(self, run_id: str, part: Part, column: str, value: Any) -> Any:
        name = f"{self._quote}{column}{self._quote}"
        at = f"WHERE {_key(part)} = '{run_id}'{_first(part)}"
        ((before,),) = [tuple(row) for row in await self._operator.query(self._dsn, f"SELECT {name} FROM perdure_{part} {at}")]
        await self._operator.query(self._dsn, f"UPDATE perdure_{part} SET {name} = {self.literal(value, column)} {at}")
        return before

    def literal(self, value: Any, column: str) -> str:
        if value is None or isinstance(value, int):
            return "NULL" if value is None else str(value)
        return f"x'{(value.encode() if isinstance(value, str) else bytes(value)).hex()}'"


class PostgresVandal(SqlVandal):
    def __init__(self, dsn: str) -> None:
        super().__init__(dsn, PostgresOperator(), '"')
        # Through a program's client payloads are text as well.
        self._payloads = frozenset[str]() if dsn.startswith("sql_client+") else PAYLOADS

    def holds(self, damage: Damage) -> bool:
        return not isinstance(damage.wrong, bytes) or damage.column in self._payloads

    def literal(self, value: Any, column: str) -> str:
        if value is None or isinstance(value, int):
            return super().literal(value, column)
        data = value.encode() if isinstance(value, str) else bytes(value)
        return f"'\\x{data.hex()}'::bytea" if column in self._payloads else f"'{data.decode()}'"


class LibsqlVandal(SqlVandal):
    """SQLite over HTTP. It gives text that is none in another form, so only other damage is made."""

    def __init__(self, dsn: str) -> None:
        super().__init__(dsn, LibsqlOperator(), '"')

    def damages(self) -> Sequence[Damage]:
        return [damage for damage in DAMAGES if not isinstance(damage.wrong, bytes) or damage.column in PAYLOADS]

    def literal(self, value: Any, column: str) -> str:
        if isinstance(value, str):
            return f"'{value}'"
        return super().literal(value, column)


class MysqlVandal(SqlVandal):
    def __init__(self, dsn: str) -> None:
        super().__init__(dsn, MysqlOperator(), "`")


class RedisVandal(Vandal):
    """Columns are bytes in a hash; an entry and an inbox row are one text each."""

    def __init__(self, dsn: str) -> None:
        self._url, options = split_options(dsn, {"table"})
        self._root = f"{{{options['table']}:}}"

    def damages(self) -> Sequence[Damage]:
        return [damage for damage in DAMAGES if damage.column not in ("inbox_seq", "journal_length")]

    def replace(self, run_id: str, part: Part, column: str, value: Any) -> Any:
        from redis import Redis

        with Redis.from_url(self._url) as client:
            if part != "runs":
                return self._replace_member(client, f"{self._root}:{_REDIS_KEYS[part]}:{run_id}", column, value)
            key = f"{self._root}:run:{run_id}"
            before = client.hget(key, column)
            if value is None:
                client.hdel(key, column)
            else:
                client.hset(key, column, value)
            return before

    def _replace_member(self, client: Any, key: str, column: str, value: Any) -> bytes:
        ((before, score),) = client.zrange(key, 0, 0, withscores=True)
        client.zrem(key, before)
        client.zadd(key, {self._damage(before, column, value): score})
        return bytes(before)

    def _damage(self, before: bytes, column: str, value: Any) -> bytes:
        if column == "started_at" and not isinstance(value, bytes):
            seq, epoch, _, rest = before.split(b":", 3)
            return b":".join([seq, epoch, str(value).encode(), rest])
        old, new = _REDIS_BYTES.get((column, value), (before, value))
        return before.replace(old, new, 1)


_REDIS_KEYS: Final = {"steps": "steps", "signals": "inbox"}
_REDIS_BYTES: Final = {
    ("key", NO_TEXT): (b"greet", b"gr\xffet"),
    ("kind", "stfp"): (b"\xa4step", b"\xa4stfp"),
    ("phase", NO_TEXT): (b"close", b"cl\xffse"),
    ("payload", NO_TEXT): (b'"hello', b"\xffhello"),
    ("name", NO_TEXT): (b":go", b":g\xff"),
    ("kind", "signbl"): (b"signal", b"signbl"),
}


class MongoVandal(Vandal):
    """A document takes every value in every field; text is always text, so bytes stand where it belongs."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn

    def damages(self) -> Sequence[Damage]:
        return DAMAGES

    def replace(self, run_id: str, part: Part, column: str, value: Any) -> Any:
        import pymongo

        field = {"journal_length": "claimed_length"}.get(column, column)
        path = {"runs": "", "steps": "tail.0.", "signals": "inbox.0."}[part] + field
        with pymongo.MongoClient[dict[str, Any]](self._dsn) as client:
            before: Any = client.get_default_database()["perdure_runs"].find_one_and_update(
                {"_id": run_id}, {"$set": {path: value}}
            )
            for name in path.split("."):
                before = before[int(name) if name.isdecimal() else name]
            return before


class ObjectVandal(Vandal):
    """A run is one text in JSON, which is read as a whole: what is wrong in one place spoils all of it."""

    def __init__(self, dsn: str) -> None:
        where = urlsplit(dsn.removeprefix("s3+"))
        bucket, _, folder = where.path.strip("/").partition("/")
        self._folder = S3Store(bucket, prefix=folder, **s3.options_for(f"{where.scheme}://{where.netloc}"))

    def damages(self) -> Sequence[Damage]:
        few = {("runs", "status"), ("runs", "epoch"), ("runs", "limit_key"), ("steps", "kind"), ("steps", "started_at")}
        return [damage for damage in DAMAGES if (damage.part, damage.column) in few]

    def replace(self, run_id: str, part: Part, column: str, value: Any) -> Any:
        path = f"/r/{run_name(run_id)}"
        (key,) = [one["path"] for page in self._folder.list() for one in page if one["path"].endswith(path)]
        before = bytes(self._folder.get(key).bytes())
        self._folder.put(
            key, value if isinstance(value, bytes) and value != NO_TEXT else self._damage(before, part, column, value)
        )
        return before

    def _damage(self, before: bytes, part: Part, column: str, value: Any) -> bytes:
        document = msgspec.json.decode(before)
        target = document["row"] if part == "runs" else document["tail"][0]
        target[column] = "@" if value == NO_TEXT else value
        return msgspec.json.encode(document).replace(b'"@"', b'"' + NO_TEXT + b'"')


_VANDALS: Final[dict[str, Callable[[str], Vandal]]] = {
    "sqlite": SqliteVandal,
    "postgres": PostgresVandal,
    "mysql": MysqlVandal,
    "libsql": LibsqlVandal,
    "redis": RedisVandal,
    "mongo": MongoVandal,
    "key_value-s3": ObjectVandal,
}


def vandal_of(backend: Backend, dsn: str) -> Vandal:
    """The vandal for a place of this backend."""
    return _VANDALS[backend.name.removeprefix("sql_client-")](dsn)

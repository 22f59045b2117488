"""The tables: their names, their set-up, and the one place where a name becomes part of SQL.

SQL in this package is written as templates (see `dialect`) made of constants only; whatever comes from outside is a bound value.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from perdure.errors import PersistenceError
from perdure.stores.sql_store.dialect import Dialect
from perdure.stores.sql_store.values import Values

if TYPE_CHECKING:
    from perdure.stores.sql_store.session import Channel

VERSION: Final = 1
TABLES: Final = ("runs", "steps", "signals", "queues", "schedules", "items", "meta", "snapshots")
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
_PLACE: Final = re.compile(r"\?(\d+)(?::(int|text))?")
_IDENTIFIER: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_READ_META: Final = "SELECT name, value FROM $meta"
_WRITE_META: Final = "INSERT INTO $meta (name, value) VALUES ('payloads', ?1), ('schema_version', ?2)"


class Statement(NamedTuple):
    """SQL as the database takes it, and the values in the order of its placeholders."""

    sql: str
    values: tuple[Any, ...]


class _Filled(NamedTuple):
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
        self._fill: Callable[[str], _Filled] = lru_cache(maxsize=1000)(self._fill_anew)

    def statement(self, template: str, *values: Any) -> Statement:
        """The statement for these values: `str` is a name, `bytes` is a payload."""
        sql, order = self._fill(template)
        stored = [self._stored(value) for value in values]
        return Statement(sql, tuple(stored[place] for place in order))

    def _stored(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.values.name(value)
        if isinstance(value, bytes):
            return self.values.payload(value)
        return int(value) if isinstance(value, bool) else value

    def _fill_anew(self, template: str) -> _Filled:
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

        return _Filled(_PLACE.sub(put, sql), tuple(places))


async def set_up(channel: Channel, tables: Tables, label: str, *, allowed: bool) -> None:
    """Leave the schema there and current. Many processes may do this at once; a killed one leaves nothing that is in the way.

    To be called in a transaction of its own.
    """
    if await _is_current(channel, tables, label):
        return
    if not allowed:
        raise PersistenceError(
            label,
            f"there are no {tables.stem!r} tables and auto_migrate is off; run `await store.setup()` once, or leave it on",
        )
    dialect = tables.dialect
    if dialect.lock_setup:
        await channel.send([tables.statement(dialect.lock_setup, tables.stem)])
    try:
        if not await _is_current(channel, tables, label):
            await _create(channel, tables)
    finally:
        if dialect.unlock_setup:
            await channel.send([tables.statement(dialect.unlock_setup, tables.stem)])


async def _create(channel: Channel, tables: Tables) -> None:
    for statement in await creation(tables):
        await channel.send([statement])


async def creation(tables: Tables) -> list[Statement]:
    """What creates the tables. Each statement stands on those before it."""
    script = await asyncio.to_thread(_script, tables.dialect.schema)
    made = [tables.statement(statement) for statement in script.split(";\n") if statement.strip()]
    return [*made, tables.statement(_WRITE_META, tables.values.kind, VERSION)]


def _script(name: str) -> str:
    text = resources.files(__package__).joinpath(name).read_text("utf-8")
    return "\n".join(line for line in text.splitlines() if not line.startswith("--")) + "\n"


async def _is_current(channel: Channel, tables: Tables, label: str) -> bool:
    """Whether the tables are there. Raises `PersistenceError` when they are others than this perdure knows."""
    has_meta = await channel.send([tables.statement(tables.dialect.has_table, f"{tables.stem}_meta")])
    if not int(has_meta[0].rows[0][0]):
        return False
    (found,) = await channel.send([tables.statement(_READ_META)])
    told = {tables.values.name_from(name): int(value) for name, value in found.rows}
    if not told and tables.dialect.unlock_setup:
        return False  # where a CREATE TABLE cannot be undone: whoever began this was killed
    _check_version(told.get("schema_version", 0), tables, label)
    if told.get("payloads") != tables.values.kind:
        raise PersistenceError(
            label,
            f"the {tables.stem!r} tables were made by another kind of store, which writes payloads otherwise; choose table=",
        )
    return True


def _check_version(version: int, tables: Tables, label: str) -> None:
    if version != VERSION:
        what = "a newer perdure; upgrade this one" if version > VERSION else "something else; choose another table="
        raise PersistenceError(
            label,
            f"the {tables.stem!r} tables have schema version {version} and this perdure knows {VERSION}: they belong to {what}",
        )


def in_pieces(rows: Sequence[Any], size: int) -> list[Sequence[Any]]:
    """The rows in lists of at most `size`: a statement takes only so many values."""
    return [rows[start : start + size] for start in range(0, len(rows), size)]

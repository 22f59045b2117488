"""Creating the tables, and refusing those of another version."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Final

from perdure.aio.threads import run_in_thread
from perdure.backends.sql.dialect import Statement, Tables
from perdure.backends.sql.session import Channel
from perdure.errors import PersistenceError

VERSION: Final = 5

_READ_META: Final = "SELECT name, value FROM $meta"
_WRITE_META: Final = "INSERT INTO $meta (name, value) VALUES ('payloads', ?1), ('schema_version', ?2)"


async def creation(tables: Tables) -> list[Statement]:
    """The statements that create the tables, in their order, read from a file in another thread."""
    return await run_in_thread(creation_statements, tables)


async def set_up(
    channel: Channel,
    tables: Tables,
    label: str,
    *,
    allowed: bool,
    load: Callable[[Tables], Awaitable[list[Statement]]] = creation,
) -> None:
    """Create the tables unless they exist, and check their version. Many processes may do this at once, and any may be killed.

    Call it in a transaction of its own. `load` returns the statements that create the tables.
    """
    if await is_current(channel, tables, label):
        return
    if not allowed:
        raise PersistenceError(
            label,
            f"there are no {tables.stem!r} tables; check the database and table=, or make them with `await store.setup()`",
        )
    dialect = tables.dialect
    if dialect.lock_setup:
        await channel.send([tables.statement(dialect.lock_setup, tables.stem)])
    try:
        if not await is_current(channel, tables, label):
            for statement in await load(tables):
                await channel.send([statement])
    finally:
        if dialect.unlock_setup:
            await channel.send([tables.statement(dialect.unlock_setup, tables.stem)])


def creation_statements(tables: Tables) -> list[Statement]:
    """As `creation`, read in the calling thread."""
    script = _script(tables.dialect.schema)
    statements = [tables.statement(statement) for statement in script.split(";\n") if statement.strip()]
    statements += [tables.statement(index) for index in tables.dialect.indexes]
    return [*statements, tables.statement(_WRITE_META, tables.values.kind, VERSION)]


def _script(name: str) -> str:
    text = resources.files(__package__).joinpath(name).read_text("utf-8")
    return "\n".join(line for line in text.splitlines() if not line.startswith("--")) + "\n"


async def is_current(channel: Channel, tables: Tables, label: str) -> bool:
    """Whether the tables are there. Raises `PersistenceError` when they are of another version or another kind of store."""
    has_meta = await channel.send([tables.statement(tables.dialect.has_table, f"{tables.stem}_meta")])
    if not int(has_meta[0].rows[0][0]):
        return False
    (found,) = await channel.send([tables.statement(_READ_META)])
    meta = {tables.values.name_from(name): int(value) for name, value in found.rows}
    if not meta and tables.dialect.unlock_setup:
        return False  # a process was killed while it created the tables, where a CREATE TABLE cannot be rolled back
    _check_version(meta.get("schema_version", 0), tables, label)
    if meta.get("payloads") != tables.values.kind:
        raise PersistenceError(
            label,
            f"the {tables.stem!r} tables were made by another kind of store, which writes payloads otherwise; choose table=",
        )
    return True


def _check_version(version: int, tables: Tables, label: str) -> None:
    if version != VERSION:
        what = (
            "a newer perdure; upgrade this one"
            if version > VERSION
            else "an earlier perdure or something else; choose another table="
        )
        raise PersistenceError(
            label,
            f"the {tables.stem!r} tables have schema version {version} and this perdure knows {VERSION}: they belong to {what}",
        )

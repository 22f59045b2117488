"""The settings of the database behind a client: refused where they would break the contract, and what its commits survive."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final

from perdure.backends.sql.dialect import SYNCHRONOUS_FULL, Statement
from perdure.backends.sql.rows import TEXT
from perdure.backends.sql.session import Channel
from perdure.errors import PersistenceError
from perdure.store import Durability


async def check_settings(dialect: str, channel: Channel, label: str) -> Durability:
    """What a commit survives. Raises `PersistenceError` for an isolation, an encoding or a mode that cannot be used."""
    return await _CHECKS[dialect](channel, label)


async def _check_postgres(channel: Channel, label: str) -> Durability:
    isolation, encoding, fsync, commit, standbys = await _select_one(
        channel,
        """
        SELECT current_setting('transaction_isolation'), current_setting('server_encoding'), current_setting('fsync'),
            current_setting('synchronous_commit'), current_setting('synchronous_standby_names')
        """,
    )
    _check_isolation(isolation, "read committed", label)
    if encoding != "UTF8":
        raise PersistenceError(label, f"the database's encoding is {encoding}, which cannot hold every id; use a UTF8 one")
    if fsync == "off" or commit == "off":
        return "process"
    return "replicated" if standbys and commit != "local" else "disk"


async def _check_mysql(channel: Channel, label: str) -> Durability:
    rows = await _select(
        channel,
        """
        SHOW VARIABLES WHERE Variable_name IN
            ('tx_isolation', 'transaction_isolation', 'innodb_flush_log_at_trx_commit', 'character_set_connection', 'sql_mode')
        """,
    )
    settings = {TEXT.name_from(name): TEXT.name_from(value) for name, value in rows}
    _check_isolation(settings.get("transaction_isolation", settings.get("tx_isolation", "")), "READ-COMMITTED", label)
    charset = settings.get("character_set_connection", "")
    if charset != "utf8mb4":
        raise PersistenceError(label, f"its connections speak {charset}, which cannot hold every id; connect with utf8mb4")
    if "STRICT_" not in settings.get("sql_mode", ""):
        raise PersistenceError(label, "its sql_mode lets values be cut that do not fit; add STRICT_ALL_TABLES to it")
    return "disk" if settings.get("innodb_flush_log_at_trx_commit") == "1" else "process"


async def _check_sqlite(channel: Channel, _: str) -> Durability:
    try:
        (synchronous,) = await _select_one(channel, "PRAGMA synchronous")
        files = [row[2] for row in await _select(channel, "PRAGMA database_list")]
    except Exception:  # noqa: BLE001 - of a service that takes no PRAGMA nothing is promised
        return "process"
    return "disk" if int(synchronous) >= SYNCHRONOUS_FULL and any(files) else "process"


def _check_isolation(found: str, wanted: str, label: str) -> None:
    if found.lower() != wanted.lower():
        raise PersistenceError(
            label, f"its transactions are {found}, in which a statement may not see what was committed before it; use {wanted}"
        )


async def _select(channel: Channel, sql: str) -> Sequence[Sequence[Any]]:
    (result,) = await channel.send([Statement(sql)])
    return result.rows


async def _select_one(channel: Channel, sql: str) -> Sequence[Any]:
    return (await _select(channel, sql))[0]


_CHECKS: Final[Mapping[str, Callable[[Channel, str], Coroutine[Any, Any, Durability]]]] = {
    "postgres": _check_postgres,
    "mysql": _check_mysql,
    "sqlite": _check_sqlite,
}

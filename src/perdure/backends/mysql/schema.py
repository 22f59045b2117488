"""What the server, its settings and the tables must be, checked when a store is opened."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from perdure.backends.mysql.connection import MysqlConnection
from perdure.backends.sql.dialect import TABLES, Tables
from perdure.errors import PersistenceError
from perdure.store import Durability

_POOL_ADVICE: Final = "open it by asyncmy.create_pool(...,"
_STRICT_MODE: Final = """init_command="SET sql_mode = 'STRICT_ALL_TABLES'")"""
_SETTINGS: Final = (
    b"SELECT VERSION(), @@max_allowed_packet, @@sql_mode, @@innodb_flush_log_at_trx_commit, @@log_bin, @@sync_binlog"
)
_UPDATE_UNCHANGED: Final = "UPDATE $meta SET value = value WHERE name = 'schema_version'"
_ENGINES: Final = f"""
    SELECT table_name, engine FROM information_schema.tables
    WHERE table_schema = DATABASE() AND table_name IN ({", ".join(f"?{number + 1}" for number in range(len(TABLES)))})
"""
_OLDEST: Final = {"MariaDB": (10, 6), "MySQL": (8, 0)}  # the first with SKIP LOCKED


class ServerSettings(NamedTuple):
    """What the store has to know of the server: the longest packet it takes, and what a commit survives."""

    max_packet: int
    durability: Durability


async def check_settings(connection: MysqlConnection, label: str) -> ServerSettings:
    """The settings of the server. Raises `PersistenceError` when runs are not safe with them."""
    (settings,) = await connection.send_texts([_SETTINGS])
    version, packet, modes, flush, log, sync = settings.rows[0]
    _check_version(label, version)
    if "STRICT_" not in modes:
        raise PersistenceError(label, f"its pool cuts short what does not fit; {_POOL_ADVICE} {_STRICT_MODE}")
    return ServerSettings(int(packet), _durability(int(flush), int(log), int(sync)))


async def check_tables(connection: MysqlConnection, tables: Tables, label: str) -> None:
    """Raise `PersistenceError` when the tables cannot roll back, or updates count only the rows that they changed."""
    names = [f"{tables.stem}_{part}" for part in TABLES]
    updated, engines = await connection.send([tables.statement(_UPDATE_UNCHANGED), tables.statement(_ENGINES, *names)])
    if updated.count != 1:
        raise PersistenceError(label, f"its pool counts only changed rows; {_POOL_ADVICE} client_flag=CLIENT.FOUND_ROWS)")
    others = [f"{name} ({engine})" for name, engine in engines.rows if engine.lower() != "innodb"]
    if others:
        raise PersistenceError(label, f"{', '.join(others)} cannot roll back: ALTER TABLE ... ENGINE=InnoDB")


def _check_version(label: str, version: str) -> None:
    kind = "MariaDB" if "MariaDB" in version else "MySQL"
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < _OLDEST[kind]:
        oldest = ".".join(map(str, _OLDEST[kind]))
        raise PersistenceError(label, f"the server is {version}, without SKIP LOCKED; the oldest that has it is {kind} {oldest}")


def _durability(flush: int, log: int, sync: int) -> Durability:
    """Whether a commit waits for the disk. With a binary log that is not synced, recovery rolls back what is not in it."""
    return "disk" if flush == 1 and (not log or sync == 1) else "process"

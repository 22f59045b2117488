"""Which database a DSN names, without the credentials in it."""

from __future__ import annotations

import os
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit


class PostgresAddress(NamedTuple):
    """Where a database is. `password` is kept to be taken out of messages, and shown nowhere."""

    hosts: str
    database: str
    search_path: str
    password: str | None

    @property
    def label(self) -> str:
        """For messages."""
        return f"PostgreSQL store {self.hosts}/{self.database}"

    def __repr__(self) -> str:
        return f"PostgresAddress({self.hosts!r}, {self.database!r})"


def parse_address(dsn: str) -> PostgresAddress:
    """The place that a DSN names. Raises `ValueError` without repeating it."""
    if not isinstance(dsn, str) or not dsn.startswith(("postgresql://", "postgres://")):
        raise ValueError("a PostgreSQL DSN begins with postgresql:// (it is not repeated here, as it may hold a password)")
    try:
        parts = urlsplit(dsn)
        options = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    except ValueError:
        raise ValueError("the PostgreSQL DSN cannot be read (it is not repeated here, as it may hold a password)") from None
    hosts = parts.netloc.rpartition("@")[2] or options.get("host") or os.environ.get("PGHOST") or "localhost"
    if ":" not in hosts and "/" not in hosts:
        hosts = f"{hosts}:{options.get('port') or os.environ.get('PGPORT') or 5432}"
    password = options.get("password") or (unquote(parts.password) if parts.password else None) or os.environ.get("PGPASSWORD")
    user = options.get("user") or (unquote(parts.username) if parts.username else None) or os.environ.get("PGUSER") or ""
    database = unquote(parts.path.removeprefix("/")) or options.get("dbname") or options.get("database")
    search_path = options.get("search_path") or options.get("options") or ""
    return PostgresAddress(hosts, database or os.environ.get("PGDATABASE") or user, search_path, password)

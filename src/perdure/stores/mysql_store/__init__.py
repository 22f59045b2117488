"""Runs in a MySQL or MariaDB database."""

from __future__ import annotations

from perdure.stores.mysql_store.store import MysqlStore

__all__ = ["MysqlStore"]

"""Runs in a MySQL or MariaDB database."""

from __future__ import annotations

from perdure.backends.mysql.store import MysqlStore

__all__ = ["MysqlStore"]

"""Runs in a PostgreSQL database."""

from __future__ import annotations

from perdure.backends.postgres.store import PostgresStore

__all__ = ["PostgresStore"]

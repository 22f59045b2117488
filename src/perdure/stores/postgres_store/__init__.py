"""Runs in a PostgreSQL database."""

from __future__ import annotations

from perdure.stores.postgres_store.store import PostgresStore

__all__ = ["PostgresStore"]

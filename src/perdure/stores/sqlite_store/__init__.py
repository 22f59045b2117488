"""Runs in an SQLite file."""

from __future__ import annotations

from perdure.stores.sqlite_store.store import SQLiteStore

__all__ = ["SQLiteStore"]

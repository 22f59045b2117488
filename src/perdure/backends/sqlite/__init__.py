"""Runs in an SQLite file."""

from __future__ import annotations

from perdure.backends.sqlite.store import SQLiteStore

__all__ = ["SQLiteStore"]

"""Runs in MongoDB: one document for each run, so that every transition is one atomic, fenced update."""

from __future__ import annotations

from perdure.stores.mongo_store.store import MongoStore

__all__ = ["MongoStore"]

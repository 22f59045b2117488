"""Runs in MongoDB: one document for each run, so that every transition is one atomic, fenced update."""

from __future__ import annotations

from perdure.backends.mongo.store import MongoStore

__all__ = ["MongoStore"]

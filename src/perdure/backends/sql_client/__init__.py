"""Runs through an SQL client that the program has already: fenced if the client has transactions."""

from __future__ import annotations

from perdure.backends.sql_client.store import SqlClientStore, sql_client
from perdure.backends.sql_client.unfenced import SqlWorkflowStore

__all__ = ["SqlClientStore", "SqlWorkflowStore", "sql_client"]

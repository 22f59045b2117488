"""Runs in plain files."""

from __future__ import annotations

from perdure.stores.files_store.store import FilesStore

__all__ = ["FilesStore"]

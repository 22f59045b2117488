"""Runs in plain files."""

from __future__ import annotations

from perdure.backends.files.store import FilesStore

__all__ = ["FilesStore"]

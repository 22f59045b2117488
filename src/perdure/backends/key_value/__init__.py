"""Runs over any key-value store or object store."""

from perdure.backends.key_value.store import KeyValueRunStore

__all__ = ["KeyValueRunStore"]

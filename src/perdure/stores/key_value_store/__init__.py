"""Runs over any key-value store or object store."""

from perdure.stores.key_value_store.store import KeyValueRunStore

__all__ = ["KeyValueRunStore"]

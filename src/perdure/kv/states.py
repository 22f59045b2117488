"""`StatePersistence`: resume states in any key-value store, each under a prefix and its id."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from perdure.errors import SnapshotFormatError
from perdure.kv.dsns import open_key_value_store
from perdure.kv.protocol import KeyValueStore, as_text, maybe_await
from perdure.model.ids import check_id
from perdure.snapshots.resume_state import ResumeState, dump_state, parse_state
from perdure.snapshots.snapshot import Snapshot


class StatePersistence:
    """Resume states in a key-value store, each under `prefix` and its id.

    Leaving `async with` closes the key-value store if `open` opened it.
    """

    def __init__(self, kv: KeyValueStore, prefix: str = "workflow:state:") -> None:
        self._kv = kv
        self._prefix = prefix
        self._is_owned = False

    @property
    def perdure_place(self) -> tuple[int, str]:
        """Equal for two objects over the same key-value store and prefix, which hold the same states."""
        return id(self._kv), self._prefix

    @classmethod
    def open(cls, dsn: str, prefix: str = "workflow:state:") -> Self:
        """States in the key-value store that a DSN names: `memory:`, `files:dir`, `sqlite:///app.db`, `postgresql://...`, ...

        It is opened by its first use, and closed by `close`. See `perdure.kv` for the DSNs and their options.
        """
        states = cls(open_key_value_store(dsn), prefix)
        states._is_owned = True
        return states

    async def close(self) -> None:
        """Close the key-value store if `open` opened it; one that was passed in stays open."""
        close = getattr(self._kv, "close", None)
        if self._is_owned and close is not None:
            await maybe_await(close())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def save(self, id: str, state: ResumeState | Snapshot, metadata: Mapping[str, Any] | None = None) -> None:  # noqa: A002 - the name people know
        """Store the state, replacing an earlier one; `metadata` is added to its own."""
        await maybe_await(self._kv.set(self._key(id), dump_state(state, **(metadata or {}))))

    async def load(self, id: str) -> ResumeState | None:  # noqa: A002 - as above
        """The state that was saved, or None when there is none. One that cannot be read is an error, and stays stored."""
        text = await self.load_raw(id)
        if text is None:
            return None
        try:
            return parse_state(text)
        except SnapshotFormatError as error:
            raise SnapshotFormatError(error.errors, f"the resume state under key {self._key(id)!r}") from error

    async def load_raw(self, id: str) -> str | None:  # noqa: A002 - as above
        """The text that was saved, not parsed."""
        text = await maybe_await(self._kv.get(self._key(id)))
        return None if text is None else as_text(text)

    async def delete(self, id: str) -> bool:  # noqa: A002 - as above
        """Whether there was a state to delete."""
        return bool(await maybe_await(self._kv.delete(self._key(id))))

    async def list(self) -> list[str]:
        """The ids under which something is saved, sorted."""
        # A star in the prefix matches more than itself, so the keys are checked once more.
        found = [as_text(key) for key in await maybe_await(self._kv.keys(f"{self._prefix}*"))]
        return sorted(key.removeprefix(self._prefix) for key in found if key.startswith(self._prefix))

    def _key(self, id: str) -> str:  # noqa: A002 - as above
        return self._prefix + check_id(id, "the id of a state")

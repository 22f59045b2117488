"""`StatePersistence`: resume states in any key-value store, each under a prefix and its id.

The key of a state is `prefix + id`, with the colons of the id escaped (`%3A`, and `%25` for a percent sign). A prefix is empty or
ends in a colon, so the last colon of a key ends its prefix: two prefixes never share a key, even if one begins the other.

Other libraries do not escape: their state of `order:1` is under `prefix + "order:1"`. `load` and `delete` look there too.
Such a key may also be ours, with a longer prefix. So `save` writes its prefix into the text, and a text of ours is never taken
for theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, Self

import msgspec

from perdure.errors import SnapshotFormatError
from perdure.kv.dsns import open_key_value_store
from perdure.kv.limits import escape_colons, unescape_colons
from perdure.kv.protocol import KeyValueStore, as_text, maybe_await
from perdure.model.ids import check_id
from perdure.snapshots.resume_state import ResumeState, dump_state, parse_state
from perdure.snapshots.snapshot import Snapshot

# The field of a text in which `save` writes its prefix.
_PREFIX_FIELD: Final = "perdurePrefix"


class StatePersistence:
    """Resume states in a key-value store, each under `prefix` and its id.

    `prefix` is empty or ends in a colon. It keeps its states to itself: `"tenant:"` sees none of `"tenant:7:"`.

    Leaving `async with` closes the key-value store if `open` opened it.
    """

    def __init__(self, kv: KeyValueStore, prefix: str = "workflow:state:") -> None:
        self._kv = _check_store(kv)
        self._prefix = _check_prefix(prefix)
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
        if isinstance(state, Snapshot):
            state = ResumeState.from_snapshot(state)
        ours = replace(state, extra={**state.extra, _PREFIX_FIELD: self._prefix})
        await maybe_await(self._kv.set(self._key(id), dump_state(ours, **(metadata or {}))))

    async def load(self, id: str) -> ResumeState | None:  # noqa: A002 - as above
        """The state that was saved, or None when there is none. One that cannot be read is an error, and stays stored."""
        found = await self._find(id)
        if found is None:
            return None
        key, text = found
        try:
            state = parse_state(text)
        except SnapshotFormatError as error:
            raise SnapshotFormatError(error.errors, f"the resume state under key {key!r}") from error
        return replace(state, extra={name: part for name, part in state.extra.items() if name != _PREFIX_FIELD})

    async def load_raw(self, id: str) -> str | None:  # noqa: A002 - as above
        """The text that was saved, not parsed."""
        found = await self._find(id)
        return None if found is None else found[1]

    async def delete(self, id: str) -> bool:  # noqa: A002 - as above
        """Whether there was a state to delete."""
        was_there = bool(await maybe_await(self._kv.delete(self._key(id))))
        theirs = await self._find(id)  # of another library, which would be found from now on
        return bool(await maybe_await(self._kv.delete(theirs[0]))) or was_there if theirs is not None else was_there

    async def list(self) -> list[str]:
        """The ids under which something is saved, sorted."""
        found = [as_text(key) for key in await maybe_await(self._kv.keys(f"{self._prefix}*"))]
        return sorted(id_ for id_ in map(self._id_in, found) if id_ is not None)

    async def _find(self, id: str) -> tuple[str, str] | None:  # noqa: A002 - as above
        """Return the key and the text of the state, if need be where another library keeps it: under the bare id."""
        key, bare = self._key(id), self._prefix + id
        text = await maybe_await(self._kv.get(key))
        if text is not None:
            return key, as_text(text)
        text = None if bare == key else await maybe_await(self._kv.get(bare))
        return None if text is None or _is_ours(as_text(text)) else (bare, as_text(text))

    def _key(self, id: str) -> str:  # noqa: A002 - as above
        return self._prefix + escape_colons(check_id(id, "the id of a state"))

    def _id_in(self, key: str) -> str | None:
        """The id of the state under this key, or None when the key is of another prefix: a star in a prefix matches any text."""
        prefix, colon, escaped = key.rpartition(":")
        return unescape_colons(escaped) if prefix + colon == self._prefix else None


def _check_store(kv: KeyValueStore) -> KeyValueStore:
    lacking = [name for name in ("get", "set", "delete", "exists", "keys") if not callable(getattr(kv, name, None))]
    if lacking:
        raise TypeError(
            f"StatePersistence takes a key-value store, and {type(kv).__name__} has no {', '.join(lacking)}: pass "
            "MemoryKeyValueStore(), another store of perdure.kv or one of your own, or call StatePersistence.open with a DSN"
        )
    return kv


def _is_ours(text: str) -> bool:
    """Return whether `save` has written this text, under whatever prefix."""
    try:
        tree = msgspec.json.decode(text)
    except (msgspec.MsgspecError, ValueError):
        return False
    return type(tree) is dict and _PREFIX_FIELD in tree


def _check_prefix(prefix: str) -> str:
    if not isinstance(prefix, str):
        raise TypeError(f"the prefix of states must be a str, not {type(prefix).__name__}")
    if prefix and not prefix.endswith(":"):
        raise ValueError(
            f"the prefix of states must end in ':', as {prefix + ':'!r} does, or be empty; else prefixes could overlap"
        )
    return prefix

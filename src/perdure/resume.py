"""Resume state: the results of a run's steps, without the run, to go on from.

    dump_state   ResumeState → {"version": 1, "entries": {key: {"result": …, "meta"?: …}}, "metadata"?}
    parse_state  that, {"kind": "ResumeState", "steps": [[key, result], …]}, or a snapshot → ResumeState

Steps are the same `StepResult` as in a snapshot whichever shape they were read from; `resume_entries` knows how the first shape
tells them. `StatePersistence` keeps states in any `KeyValueStore`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Self, TypeGuard, overload

from perdure.errors import SnapshotFormatError
from perdure.keyvalue import KeyValueStore, settled
from perdure.plainjson import Problems, described, own_copy, write_text
from perdure.records import check_id
from perdure.resume_entries import entry_of, read_entry
from perdure.snapshot import AROUND_VALUES, Execution, ExecutionStatus, Snapshot, StepResult, checked
from perdure.snapshot_validation import Fields, raw_tree, read_snapshot, read_step

if TYPE_CHECKING:
    from perdure.events import Event, StepComplete

_WHAT: Final = "the resume state"
# The document, its entries, an entry, its result: what stands around a value.
_AROUND_VALUES: Final = 4
# What another shape says under these names cannot be kept, because `dump_state` uses them itself.
_OF_WRITTEN_FORM: Final = frozenset({"version", "entries"})


@dataclass(frozen=True, slots=True)
class ResumeState:
    """What the steps of a run gave, by key and in the order in which they were recorded, and the caller's own metadata."""

    steps: dict[str, StepResult] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    # Fields of the document that this version does not know.
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_snapshot(cls, snapshot: Snapshot) -> ResumeState:
        """The steps and metadata of a snapshot, without how the run stood."""
        return cls(dict(snapshot.steps), dict(snapshot.metadata or {}))

    def to_snapshot(
        self, *, status: ExecutionStatus = "running", last_updated: datetime | None = None, workflow_name: str | None = None
    ) -> Snapshot:
        """A snapshot with these steps and this metadata, taken now unless `last_updated` says when."""
        at = last_updated or datetime.now(UTC)
        ended_at = None if status == "running" else at
        current = next(reversed(self.steps), None)
        execution = Execution(status=status, last_updated=at, completed_at=ended_at, current_step_id=current)
        return Snapshot(steps=self.steps, execution=execution, metadata=self.metadata or None, workflow_name=workflow_name)


@overload
def is_step_complete(state: Event, /) -> TypeGuard[StepComplete]: ...
@overload
def is_step_complete(state: ResumeState | Snapshot | None, key: str) -> bool: ...
def is_step_complete(state: Any, key: str | None = None) -> bool:
    """Whether the step `key` is recorded there, and as a success; or whether an event is a step's `step_complete`."""
    if key is None:
        return getattr(state, "type", None) == "step_complete"
    result = None if state is None else state.steps.get(key)
    return result is not None and result.ok


def dump_state(state: ResumeState | Snapshot, /, **metadata: Any) -> str:
    """The state as JSON text that `parse_state` and the TypeScript library read; `metadata` is added to the state's own.

    `SnapshotFormatError` when a part of it is no plain JSON.
    """
    if isinstance(state, Snapshot):
        state = ResumeState.from_snapshot(state)
    try:
        return write_text(checked(_tree(state, metadata), around=_AROUND_VALUES, what=_WHAT))
    except RecursionError:
        raise SnapshotFormatError([("$", "is nested too deeply for the stack that is left")], _WHAT) from None


def _tree(state: ResumeState, metadata: dict[str, Any]) -> dict[str, Any]:
    entries = {key: entry_of(step) for key, step in state.steps.items()}
    told = {**state.metadata, **metadata}
    return {**state.extra, "version": 1, "entries": entries, **({"metadata": told} if told else {})}


def parse_state(document: str | bytes | dict[str, Any]) -> ResumeState:
    """The state in a JSON text or dict of any of the three shapes; `SnapshotFormatError` when it is none of them."""
    problems = Problems()
    raw = raw_tree(document, problems)
    is_snapshot = isinstance(raw, dict) and "formatVersion" in raw
    tree = own_copy(raw, problems, around=AROUND_VALUES if is_snapshot else _AROUND_VALUES)
    state = None if tree is None and problems else _read_state(tree, problems)
    if state is None or problems:
        raise SnapshotFormatError(problems.listed(), _WHAT)
    return state


def _read_state(tree: Any, problems: Problems) -> ResumeState | None:
    if type(tree) is dict and "formatVersion" in tree:
        snapshot = read_snapshot(tree, problems)
        return None if snapshot is None else ResumeState.from_snapshot(snapshot)
    fields = Fields.of(tree, (), problems)
    if fields is None:
        return None
    if "kind" in tree:
        return _read_pairs(fields, problems)
    if "version" in tree:
        return _read_entries(fields, problems)
    problems.add((), 'has neither "version", nor "kind", nor "formatVersion", so it is no state of any known shape')
    return None


def _read_entries(fields: Fields, problems: Problems) -> ResumeState | None:
    if not fields.version("version", "resume state"):
        return None
    entries = fields.mapping("entries") or {}
    read = {key: read_entry(key, entry, ("entries", key), problems) for key, entry in entries.items()}
    return _state(read, fields)


def _read_pairs(fields: Fields, problems: Problems) -> ResumeState:
    fields.choice("kind", "ResumeState")
    read: dict[str, StepResult | None] = {}
    for index, pair in enumerate(fields.items("steps") or ()):
        if type(pair) is not list or len(pair) != 2 or type(pair[0]) is not str:
            problems.add(("steps", index), f"must be a list of a key and its result, not {described(pair)}")
        elif pair[0] in read:
            problems.add(("steps", index, 0), "is a key that an earlier step has")
        else:
            read[pair[0]] = read_step(pair[0], pair[1], ("steps", index, 1), problems, may_lack_value=True)
    return _state(read, fields)


def _state(read: dict[str, StepResult | None], fields: Fields) -> ResumeState:
    metadata = fields.mapping("metadata", optional=True) or {}
    extra = {name: kept for name, kept in fields.rest().items() if name not in _OF_WRITTEN_FORM}
    return ResumeState({key: step for key, step in read.items() if step is not None}, metadata, extra)


class StatePersistence:
    """Resume states in a key-value store, each under `prefix` and its id.

    `async with` closes at its end what `open` has opened.
    """

    def __init__(self, kv: KeyValueStore, prefix: str = "workflow:state:") -> None:
        self._kv = kv
        self._prefix = prefix
        self._is_owned = False

    @classmethod
    def open(cls, dsn: str, prefix: str = "workflow:state:") -> Self:
        """States in the key-value store that a DSN names: `memory:`, `files:dir`, `sqlite:///app.db`, `postgresql://...`, ...

        It is opened by its first use, and closed by `close`. See `perdure.keyvalues` for the DSNs and their options.
        """
        from perdure.keyvalues.dsns import open_key_value_store

        states = cls(open_key_value_store(dsn), prefix)
        states._is_owned = True
        return states

    async def close(self) -> None:
        """Close the key-value store if `open` opened it; one that was passed in stays its owner's."""
        close = getattr(self._kv, "close", None)
        if self._is_owned and close is not None:
            await settled(close())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def save(self, id: str, state: ResumeState | Snapshot, metadata: Mapping[str, Any] | None = None) -> None:  # noqa: A002 - the name people know
        """Keep the state, in place of what was there; `metadata` is added to its own."""
        await settled(self._kv.set(self._key(id), dump_state(state, **(metadata or {}))))

    async def load(self, id: str) -> ResumeState | None:  # noqa: A002 - as above
        """The state that was saved, or None when there is none. One that cannot be read is an error, and stays where it is."""
        text = await self.load_raw(id)
        if text is None:
            return None
        try:
            return parse_state(text)
        except SnapshotFormatError as error:
            raise SnapshotFormatError(error.errors, f"the resume state under key {self._key(id)!r}") from error

    async def load_raw(self, id: str) -> str | None:  # noqa: A002 - as above
        """The text that was saved, unread."""
        return await settled(self._kv.get(self._key(id)))

    async def delete(self, id: str) -> bool:  # noqa: A002 - as above
        """Whether there was a state to delete."""
        return bool(await settled(self._kv.delete(self._key(id))))

    async def list(self) -> list[str]:
        """The ids under which something is saved, sorted."""
        # A star in the prefix matches more than itself, so the keys are looked at once more.
        found = await settled(self._kv.keys(f"{self._prefix}*"))
        return sorted(key.removeprefix(self._prefix) for key in found if key.startswith(self._prefix))

    def _key(self, id: str) -> str:  # noqa: A002 - as above
        return self._prefix + check_id(id, "the id of a state")

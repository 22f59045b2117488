"""How runs change: for each run one write at a time, and changes that are asked for meanwhile go into the next one together.

A change is made on the document as it was last seen and written by compare-and-swap: one write, if this process was the last to
change the run. Otherwise the document is read and changed again. A verb that is refused on a remembered document, or
that changes nothing, is called again on a fresh one, so no caller gets an outdated answer.

The run's due key and exists key are written before the document and deleted after it (see `keys`); so are its blobs.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Generic, NamedTuple, TypeVar

from perdure.backends.key_value import verbs
from perdure.backends.key_value.editable_run import EditableRun, NeedsHistory
from perdure.backends.key_value.keys import DueKey, new_nonce, run_name
from perdure.backends.key_value.namespace import KeyValueNamespace, StoredDocument, map_concurrently
from perdure.backends.key_value.run_document import (
    ORIGINS,
    RunDocument,
    add_nonce,
    decode_document,
    encode,
    is_full,
    key_names,
    temporary_blobs,
)
from perdure.errors import PerdureError, PersistenceError
from perdure.model.records import RunRow

T = TypeVar("T")

_REMEMBERED: Final = 1000
_PATIENCE: Final = 60.0
_FIRST_PAUSE: Final = 0.005
_LONGEST_PAUSE: Final = 0.5


@dataclass(slots=True)
class _PendingChange(Generic[T]):
    """A verb and the future of its result. The run's id, or "" if only its name is known."""

    verb: Callable[[EditableRun], T]
    future: asyncio.Future[T]
    run_id: str


class _VerbResult(NamedTuple):
    value: Any = None
    error: BaseException | None = None


class RunWriter:
    """Makes the changes of all runs of a namespace. All of it runs on one event loop."""

    def __init__(self, namespace: KeyValueNamespace) -> None:
        self._namespace = namespace
        # By run name, only while a task writes the run: the changes that go into its next write.
        self._waiting: dict[str, deque[_PendingChange[Any]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # Documents that were last read or written, so that the next change need not read first.
        self._known: OrderedDict[str, StoredDocument] = OrderedDict()

    async def change(self, run_id: str, verb: Callable[[EditableRun], T]) -> T:
        """What the verb returns, once what it changed is written."""
        return await self.change_named(run_name(run_id), verb, run_id)

    async def change_named(self, name: str, verb: Callable[[EditableRun], T], run_id: str = "") -> T:
        """As `change`, of a run whose id may not be known."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        change = _PendingChange(verb, future, run_id)
        waiting = self._waiting.get(name)
        if waiting is not None:
            waiting.append(change)
        else:
            self._waiting[name] = deque([change])
            task = asyncio.ensure_future(self._write_changes(name))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await future

    async def notify_parent(self, run_id: str) -> None:
        """Deliver the outcome of an ended run to its parent, if that is still to be done.

        Child and parent are two documents. The child's says in one change that it has ended and that its parent must be notified;
        then the parent gets the outcome, once for each end; then the child's says that this is done. After a crash in between the
        child is still found by its due key, and the next `claim` calls this again.
        """
        debt = await self._namespace.read(run_id, self._load_debt)
        if debt is None:
            return
        row, outcome = debt
        if row.parent_id is not None:
            await self.change(row.parent_id, lambda run: verbs.deliver_outcome(run, row, outcome))
        await self.change(run_id, lambda run: verbs.set_parent_notified(run, row.epoch))

    async def _load_debt(self, document: RunDocument, row: RunRow) -> tuple[RunRow, bytes] | None:
        if not document.owes_parent:
            return None
        whole = await self._namespace.load_columns(row, document.incarnation)
        return row, whole.outcome or b""

    def remember(self, name: str, stored: StoredDocument) -> None:
        """Remember a document that was just read elsewhere."""
        if name not in self._waiting:
            self._remember(name, stored)

    async def _write_changes(self, name: str) -> None:
        """Write the run until no change waits."""
        waiting = self._waiting[name]
        while waiting:
            batch = list(waiting)
            waiting.clear()
            try:
                results = await self._change(name, batch)
            except BaseException as error:  # noqa: BLE001 - the callers get it
                results = [_VerbResult(error=_copy_error(error)) for _ in batch]
            for change, result in zip(batch, results, strict=True):
                _resolve(change.future, result)
        del self._waiting[name]

    async def _change(self, name: str, batch: list[_PendingChange[Any]]) -> list[_VerbResult]:
        """What each verb returned or was refused with, once what they changed is written, in one write."""
        run_id = next((change.run_id for change in batch if change.run_id), "")
        stored, is_fresh = self._known.pop(name, None), False
        nonce, pause, deadline = new_nonce(), _FIRST_PAUSE, asyncio.get_running_loop().time() + _PATIENCE
        while True:
            if stored is None:
                stored, is_fresh = await self._namespace.load_document(name, run_id), True
            attempt = _WriteAttempt(self._namespace, name, run_id, stored)
            await attempt.make_room()
            results = [await attempt.call(change.verb) for change in batch]
            is_changed = attempt.is_changed
            if not is_fresh and (not is_changed or any(result.error for result in results)):
                stored = None
                continue
            if not is_changed:
                self._remember(name, stored)
                return results
            written = await attempt.write(nonce)
            if written is not None:
                self._remember(name, written)
                return results
            if asyncio.get_running_loop().time() > deadline:
                raise PersistenceError(f"run {run_id!r}", f"others changed it again and again for {_PATIENCE:g} s; try later")
            stored = None
            await asyncio.sleep(pause * (0.5 + random.random()))  # noqa: S311 - to spread out, not to hide
            pause = min(pause * 2, _LONGEST_PAUSE)

    def _remember(self, name: str, stored: StoredDocument | None) -> None:
        # A deleted run is not remembered, as its document may be deleted too.
        if stored is not None and stored.document.row is not None:
            self._known[name] = stored
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)


class _WriteAttempt:
    """One attempt to change a run's document."""

    def __init__(self, namespace: KeyValueNamespace, name: str, run_id: str, stored: StoredDocument | None) -> None:
        self._namespace = namespace
        self._name = name
        self._stored = stored
        # Decoded for each attempt, so that a failed one leaves no trace.
        document = None if stored is None else decode_document(stored.data, run_id or name)
        stored_id = document.row.id if document is not None and document.row is not None else ""
        self._run = EditableRun(run_id or stored_id, document)
        self._before = b"" if stored is None else stored.data
        self._temporary = set() if document is None else set(temporary_blobs(document))

    async def make_room(self) -> None:
        """Move what grew too long out of the document. That alone is no reason to write it."""
        document = self._run.document
        if document is None or document.row is None:
            return
        if is_full(document):
            await self._namespace.move_tail(self._run.id, document)
            self._before = encode(document)
        if len(document.origins) >= ORIGINS:
            await self._namespace.move_origins(self._run.id, document)
            self._before = encode(document)

    async def call(self, verb: Callable[[EditableRun], Any]) -> _VerbResult:
        """What the verb returns or is refused with; one that is refused has changed nothing."""
        try:
            return _VerbResult(verb(self._run))
        except NeedsHistory:
            document = self._run.document
            if document is not None:
                self._run.history = await self._namespace.load_history(self._run.id, document)
            return await self.call(verb)
        except PerdureError as refusal:
            return _VerbResult(error=refusal)

    @property
    def is_changed(self) -> bool:
        """Whether the document has to be written."""
        document = self._run.document
        return document is not None and (self._run.is_touched or encode(document) != self._before)

    async def write(self, nonce: str) -> StoredDocument | None:
        """The document as it is stored now, or None when another writer has changed it meanwhile."""
        document, run_id = self._run.document, self._run.id
        if document is None:
            raise PersistenceError(f"run {run_id!r}", "there is nothing to write")
        document.due_key = _due_key_name(document)
        before = key_names(None if self._stored is None else self._stored.document)
        now = key_names(document)
        await map_concurrently(self._namespace.names.add, now - before)
        if self._run.blobs:
            await self._namespace.put_blobs(run_id, document.incarnation, self._run.blobs)
        add_nonce(document, nonce)
        written = await self._write_document(document, nonce)
        if written is None:
            await map_concurrently(self._namespace.names.discard, now - before)
            return None
        with contextlib.suppress(Exception):  # the change is committed, so its caller must get the result
            await self._clean_up(document)
            await map_concurrently(self._namespace.names.discard, before - now)
        return written

    async def _write_document(self, document: RunDocument, nonce: str) -> StoredDocument | None:
        key, data = self._namespace.document_key(self._name), encode(document)
        try:
            version = await self._namespace.backend.write_if(key, data, None if self._stored is None else self._stored.version)
        except Exception:
            # The reply was lost, and the write may be there or not; if it is not, it may still arrive.
            found = await self._find_write(nonce)
            if found is None:
                raise
            return found
        return await self._find_write(nonce) if version is None else StoredDocument(document, version, data)

    async def _find_write(self, nonce: str) -> StoredDocument | None:
        """The document as it is now, if the write with this nonce was made."""
        found = await self._namespace.load_document(self._name)
        return found if found is not None and nonce in found.document.nonces else None

    async def _clean_up(self, document: RunDocument) -> None:
        """Delete what stood beside the document before. What a crash leaves here is deleted later, or only takes space."""
        namespace, run_id, before = self._namespace, self._run.id, None if self._stored is None else self._stored.document
        if before is not None and before.incarnation == document.incarnation:
            await namespace.remove_blobs(run_id, document.incarnation, self._temporary - set(temporary_blobs(document)))
            if self._run.left_behind or document.first_chunk != before.first_chunk:
                chunks = range(before.first_chunk, document.first_chunk)
                await namespace.remove_journal(run_id, document.incarnation, chunks, self._run.left_behind)
        elif before is not None and before.row is not None:
            await namespace.remove_incarnation(run_id, before)
        if document.row is None and not namespace.is_shared:
            await namespace.backend.remove(namespace.document_key(self._name))


def _due_key_name(document: RunDocument) -> str:
    """The name of the run's due key: the present one, if it still says what the run's row says."""
    if document.row is None:
        return ""
    due_key = DueKey.of(document.row, owes_parent=document.owes_parent)
    return document.due_key if due_key.has_content_of(DueKey.read(document.due_key)) else due_key.with_nonce().name


def _copy_error(error: BaseException) -> BaseException:
    """The error for one of several callers, as each adds its own traceback."""
    return PersistenceError(*error.args) if type(error) is PersistenceError else error


def _resolve(future: asyncio.Future[Any], result: _VerbResult) -> None:
    if future.done():
        return
    if result.error is None:
        future.set_result(result.value)
    else:
        future.set_exception(result.error)

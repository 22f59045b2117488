"""How runs change: for each run one change at a time, and what is asked meanwhile goes into the next one together.

A change is made on what is known of the document and written if nobody else has written since: one write, when the run was last
changed here. Otherwise the document is read again and the change made anew. Nobody is refused anything because of what was only
remembered, and what needs no write was read after it was asked.

The run's card and badge come before the document and go after it (see `cards`); so do the payloads that are kept beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Generic, NamedTuple, TypeVar

from perdure.backends.key_value.cards import Card
from perdure.backends.key_value.document import ORIGINS, Document, encoded, names_of, passing_parcels, read_document, signed
from perdure.backends.key_value.names import nonce, run_name
from perdure.backends.key_value.place import Kept, Place, each
from perdure.backends.key_value.run import NeedsHistory, Run, is_full
from perdure.errors import PerdureError, PersistenceError

T = TypeVar("T")

_REMEMBERED: Final = 1000
_PATIENCE: Final = 60.0
_FIRST_PAUSE: Final = 0.005
_LONGEST_PAUSE: Final = 0.5


@dataclass(slots=True)
class _Asked(Generic[T]):
    """A verb, and who waits for what it gives. The run's id, unless only its name is known."""

    verb: Callable[[Run], T]
    future: asyncio.Future[T]
    run_id: str


class _Outcome(NamedTuple):
    value: Any = None
    error: BaseException | None = None


class Lanes:
    """The changes of all runs of a place. All of it runs on one event loop."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._waiting: dict[str, deque[_Asked[Any]]] = {}
        self._under_way: set[asyncio.Task[None]] = set()
        # What was last read or written, so that the next change need not read first.
        self._known: OrderedDict[str, Kept] = OrderedDict()

    async def change(self, run_id: str, verb: Callable[[Run], T]) -> T:
        """What the verb gives, once what it changed is kept."""
        return await self.change_named(run_name(run_id), verb, run_id)

    async def change_named(self, name: str, verb: Callable[[Run], T], run_id: str = "") -> T:
        """As `change`, of a run whose id may not be known."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        asked = _Asked(verb, future, run_id)
        line = self._waiting.get(name)
        if line is not None:
            line.append(asked)
        else:
            self._waiting[name] = deque([asked])
            task = asyncio.ensure_future(self._serve(name))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)
        return await future

    def know(self, name: str, kept: Kept) -> None:
        """Remember a document that somebody has just read."""
        if name not in self._waiting:
            self._remember(name, kept)

    async def _serve(self, name: str) -> None:
        line = self._waiting[name]
        while line:
            batch = list(line)
            line.clear()
            try:
                outcomes = await self._change(name, batch)
            except BaseException as error:  # noqa: BLE001 - those who asked hear of it
                outcomes = [_Outcome(error=_one_more(error)) for _ in batch]
            for asked, outcome in zip(batch, outcomes, strict=True):
                _settle(asked.future, outcome)
        del self._waiting[name]

    async def _change(self, name: str, batch: list[_Asked[Any]]) -> list[_Outcome]:
        """What each verb gave or was refused with, once what they changed is kept in one write."""
        run_id = next((asked.run_id for asked in batch if asked.run_id), "")
        kept, is_fresh = self._known.pop(name, None), False
        mark, pause, deadline = nonce(), _FIRST_PAUSE, asyncio.get_running_loop().time() + _PATIENCE
        while True:
            if kept is None:
                kept, is_fresh = await self._place.document(name), True
            attempt = _Attempt(self._place, name, run_id, kept)
            await attempt.make_room()
            outcomes = [await attempt.outcome(asked.verb) for asked in batch]
            is_changed = attempt.is_changed
            if not is_fresh and (not is_changed or any(outcome.error for outcome in outcomes)):
                kept = None
                continue
            if not is_changed:
                self._remember(name, kept)
                return outcomes
            written = await attempt.write(mark)
            if written is not None:
                self._remember(name, written)
                return outcomes
            if asyncio.get_running_loop().time() > deadline:
                raise PersistenceError(f"run {run_id!r}", f"others changed it again and again for {_PATIENCE:g} s; try later")
            kept = None
            await asyncio.sleep(pause * (0.5 + random.random()))  # noqa: S311 - to spread out, not to hide
            pause = min(pause * 2, _LONGEST_PAUSE)

    def _remember(self, name: str, kept: Kept | None) -> None:
        # Of a run that is gone nothing is remembered, as its document may be gone too.
        if kept is not None and kept.document.row is not None:
            self._known[name] = kept
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)


class _Attempt:
    """One try at changing a run's document."""

    def __init__(self, place: Place, name: str, run_id: str, kept: Kept | None) -> None:
        self._place = place
        self._name = name
        self._kept = kept
        # Read from its bytes each time, so that a try that comes to nothing leaves no trace.
        document = None if kept is None else read_document(kept.data, run_id or name)
        self._run = Run(run_id or (document.row.id if document is not None and document.row is not None else ""), document)
        self._before = b"" if kept is None else kept.data
        self._passing = set() if document is None else set(passing_parcels(document))

    async def make_room(self) -> None:
        """Move what grew too long out of the document. That alone is no reason to write it."""
        document = self._run.document
        if document is None or document.row is None:
            return
        if is_full(document):
            await self._place.move_tail(self._run.id, document)
            self._before = encoded(document)
        if len(document.origins) >= ORIGINS:
            await self._place.move_origins(self._run.id, document)
            self._before = encoded(document)

    async def outcome(self, verb: Callable[[Run], Any]) -> _Outcome:
        """What the verb gives or is refused with; one that is refused has changed nothing."""
        try:
            return _Outcome(verb(self._run))
        except NeedsHistory:
            document = self._run.document
            if document is not None:
                self._run.history = await self._place.history(self._run.id, document)
            return await self.outcome(verb)
        except PerdureError as refusal:
            return _Outcome(error=refusal)

    @property
    def is_changed(self) -> bool:
        """Whether the document says something else now."""
        document = self._run.document
        return document is not None and (self._run.is_touched or encoded(document) != self._before)

    async def write(self, mark: str) -> Kept | None:
        """The document as it is kept now, or None when somebody else has changed it meanwhile."""
        document, run_id = self._run.document, self._run.id
        if document is None:
            raise PersistenceError(f"run {run_id!r}", "there is nothing to write")
        document.card = self._card(document)
        before = names_of(None if self._kept is None else self._kept.document)
        now = names_of(document)
        await each(self._place.names.add, now - before)
        if self._run.parcels:
            await self._place.put_parcels(run_id, document.incarnation, self._run.parcels)
        signed(document, mark)
        written = await self._write_document(document, mark)
        if written is None:
            await each(self._place.names.discard, now - before)
            return None
        with contextlib.suppress(Exception):  # it is done, and who asked must hear of it; what is left is found later
            await self._tidy(document)
            await each(self._place.names.discard, before - now)
        return written

    def _card(self, document: Document) -> str:
        if document.row is None:
            return ""
        card = Card.of(document.row, owes_parent=document.owes_parent)
        return document.card if card.says(Card.read(document.card)) else card.signed().name

    async def _write_document(self, document: Document, mark: str) -> Kept | None:
        key, data = self._place.document_key(self._name), encoded(document)
        try:
            version = await self._place.backend.write_if(key, data, None if self._kept is None else self._kept.version)
        except Exception:
            # The answer is lost, and the write may be there or not; if it is not, it may still come.
            found = await self._made(mark)
            if found is None:
                raise
            return found
        return await self._made(mark) if version is None else Kept(document, version, data)

    async def _made(self, mark: str) -> Kept | None:
        """The document as it is now, if the write with this mark was made."""
        found = await self._place.document(self._name)
        return found if found is not None and mark in found.document.nonces else None

    async def _tidy(self, document: Document) -> None:
        """Take away what stood beside the document before. What a crash leaves here is found later, or only costs room."""
        place, run_id, before = self._place, self._run.id, None if self._kept is None else self._kept.document
        if before is not None and before.incarnation == document.incarnation:
            await place.remove_parcels(run_id, document.incarnation, self._passing - set(passing_parcels(document)))
        elif before is not None and before.row is not None:
            await place.remove_incarnation(run_id, before)
        if document.row is None and not place.is_shared:
            await place.backend.remove(place.document_key(self._name))


def _one_more(error: BaseException) -> BaseException:
    """The error for one of several callers, as each adds its own traceback."""
    return PersistenceError(*error.args) if type(error) is PersistenceError else error


def _settle(future: asyncio.Future[Any], outcome: _Outcome) -> None:
    if future.done():
        return
    if outcome.error is None:
        future.set_result(outcome.value)
    else:
        future.set_exception(outcome.error)

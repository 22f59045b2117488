"""Which runs a worker gets.

What is due is known by its cards; the run's document decides. Where a queue has a limit, those who claim take turns, so that they
keep to it together; a turn that is not given back ends by itself, so a worker that stands still for longer than that may go over
the limit.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Final, NamedTuple

from perdure.backends.key_value.cards import LEASED, Card
from perdure.backends.key_value.cell import Cell, Signed
from perdure.backends.key_value.finding import Finder, Owned
from perdure.backends.key_value.lanes import Lanes
from perdure.backends.key_value.names import nonce, run_name, short
from perdure.backends.key_value.place import Place, each
from perdure.backends.key_value.run import Given, Run
from perdure.backends.key_value.settings import SettingsBook
from perdure.backends.key_value.telling import Teller
from perdure.errors import SnapshotCorrupt
from perdure.model.records import ENDED, Claim, Claims, QueueLimits, RunRow

_TURN_SECONDS: Final = 10
_ASK_AGAIN: Final = 0.02
_AT_ONCE: Final = 16


class Wanted(NamedTuple):
    """Which runs a worker takes."""

    workflows: frozenset[str]
    queues: frozenset[str] | None

    @classmethod
    def of(cls, workflows: Collection[str], queues: Collection[str] | None) -> Wanted:
        """The runs of these workflows in these queues, or in all."""
        return cls(frozenset(workflows), None if queues is None else frozenset(queues))

    def has(self, row: RunRow) -> bool:
        """Whether runs like this are wanted."""
        return row.workflow in self.workflows and (self.queues is None or row.queue in self.queues)

    def among(self, cards: Iterable[Card]) -> list[Card]:
        """The cards of runs that seem to be wanted."""
        workflows = {short(name) for name in self.workflows} | {""}
        queues = None if self.queues is None else {short(name) for name in self.queues} | {""}
        return [card for card in cards if card.workflow in workflows and (queues is None or card.queue in queues)]


class Terms(NamedTuple):
    """On which terms runs are leased."""

    ttl: float
    wanted: Wanted
    owner: str
    now: int


class Room:
    """How many more runs the queue limits let in. Only leases that have not expired take a place."""

    def __init__(self, limits: dict[str, QueueLimits]) -> None:
        self._limits = limits
        self._taken: Counter[tuple[str, str | None]] = Counter()

    def has(self, row: RunRow) -> bool:
        """Whether this run can be leased."""
        limits = self._limits.get(row.queue, QueueLimits())
        return _below(self._taken[row.queue, None], limits.concurrency) and (
            row.limit_key is None or _below(self._taken[row.queue, row.limit_key], limits.key_concurrency)
        )

    def take(self, row: RunRow) -> None:
        """Count this run."""
        self._taken[row.queue, None] += 1
        if row.limit_key is not None:
            self._taken[row.queue, row.limit_key] += 1


class Turn(Signed, kw_only=True):
    """Whose turn it is to claim, and until when, by the clocks of those who claim."""

    token: str = ""
    until: float = 0.0


class Claimer:
    """What a worker asks of one place."""

    def __init__(self, place: Place, lanes: Lanes, settings: SettingsBook, teller: Teller) -> None:
        self._place = place
        self._lanes = lanes
        self._settings = settings
        self._teller = teller
        self.finder = Finder(place, lanes)
        self._turn = Cell(place.backend, f"{place.root}/turn", Turn)
        # Held by who claims under limits, before asking the other processes.
        self._claiming = asyncio.Lock()

    async def claim(self, limit: int, ttl: float, wanted: Wanted, owner: str, now: int) -> Claims:
        """Lease up to `limit` due runs."""
        settings = await self._settings.read()
        await self._settings.create_fired(settings.fired)
        limits = {queue: one for queue, one in settings.limits.items() if one != QueueLimits()}
        due, later = await self._timed(now)
        next_wake_at = min((card.wake_at for card in wanted.among(later)), default=None)
        if limit < 1 or not wanted.among(due):
            return Claims(claims=[], next_wake_at=next_wake_at)
        terms = Terms(ttl, wanted, owner, now)
        given = await (self._within(limits, limit, terms) if limits else self._freely(due, limit, terms))
        claims = await each(self._readable, given)
        return Claims(claims=[claim for claim in claims if claim is not None], next_wake_at=next_wake_at)

    async def _readable(self, given: Given) -> Claim | None:
        """The claim, or None when the run cannot be read: who asks for it hears of that, and it must not hold up the others."""
        with suppress(SnapshotCorrupt):
            return await self.filled(given)
        return None

    async def due(self, now: int, limit: int) -> list[str]:
        """Ids of the runs that may be claimed now, longest due first."""
        await self._settings.create_fired((await self._settings.read()).fired)
        cards, _ = await self._timed(now)
        found: list[str] = []
        async for owned in self.finder.in_order(cards, lambda card: card.wake_at):
            if len(found) >= limit:
                break
            if _may_be_claimed(owned.row, now):
                found.append(owned.row.id)
        return found

    async def _timed(self, now: int) -> tuple[list[Card], list[Card]]:
        """What is due and what is next, once every parent was told of what its children came to."""
        due, later = await self.finder.timed(now)
        owing = [card for card in (*due, *later) if card.status in ENDED]
        async for owned in self.finder.in_order(owing, lambda card: card.wake_at):
            with suppress(SnapshotCorrupt):  # whoever asks for the one that cannot be read hears of that
                await self._teller.tell_parent(owned.row.id)
        if owing:
            due, later = await self.finder.timed(now)
        return [card for card in due if card.status not in ENDED], [card for card in later if card.status not in ENDED]

    async def _freely(self, due: list[Card], limit: int, terms: Terms) -> list[Given]:
        """Lease due runs, several at a time."""
        given: list[Given] = []
        batch: list[Owned] = []
        async for owned in self.finder.in_order(terms.wanted.among(due), _by_priority):
            batch.append(owned)
            if len(batch) == min(_AT_ONCE, limit - len(given)):
                given += await self._give_all(batch, terms)
                batch = []
            if len(given) == limit:
                return given
        return given + await self._give_all(batch, terms)

    async def _give_all(self, batch: list[Owned], terms: Terms) -> list[Given]:
        answers = await asyncio.gather(*(self._give(owned, terms) for owned in batch), return_exceptions=True)
        given = [answer for answer in answers if isinstance(answer, Given)]
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        if errors and not given:
            raise errors[0]
        return given  # what was leased must reach its worker

    async def _give(self, owned: Owned, terms: Terms) -> Given | None:
        """The lease, if the run still is as its card said."""

        def give(run: Run) -> Given | None:
            row = run.row
            if row is None or not _may_be_claimed(row, terms.now) or not terms.wanted.has(row):
                return None
            return run.give(terms.ttl, terms.owner, terms.now)

        return await self._lanes.change(owned.row.id, give)

    async def _within(self, limits: dict[str, QueueLimits], limit: int, terms: Terms) -> list[Given]:
        """Lease due runs one by one, as far as their queues have room, while nobody else does."""
        async with self._my_turn():
            due, _ = await self._timed(terms.now)
            room = await self._room(limits, terms.now)
            given: list[Given] = []
            async for owned in self.finder.in_order(terms.wanted.among(due), _by_priority):
                if len(given) == limit:
                    break
                got = await self._give(owned, terms) if room.has(owned.row) else None
                if got is not None:
                    room.take(got.row)
                    given.append(got)
            return given

    async def _room(self, limits: dict[str, QueueLimits], now: int) -> Room:
        room, queues = Room(limits), {short(queue) for queue in limits}
        leased = [card for card in await self.finder.shelf(LEASED) if card.queue in queues and card.wake_at > now]
        async for owned in self.finder.in_order(leased, lambda card: card.wake_at):
            if owned.row.lease_until is not None and owned.row.lease_until > now:
                room.take(owned.row)
        return room

    @asynccontextmanager
    async def _my_turn(self) -> AsyncIterator[None]:
        async with self._claiming:
            token = nonce()
            while self._place.is_shared and not await self._turn.change(lambda turn: _taken(turn, token)):  # noqa: ASYNC110 - others
                await asyncio.sleep(_ASK_AGAIN)
            try:
                yield
            finally:
                if self._place.is_shared:
                    await self._turn.change(lambda turn: _given_back(turn, token))

    async def filled(self, given: Given) -> Claim | None:
        """The claim, or None when the run was deleted before its worker got it."""
        try:
            return await self._place.claim(given)
        except SnapshotCorrupt:
            kept = await self._place.document(run_name(given.lease.run_id))
            if kept is not None and kept.document.incarnation == given.incarnation:
                raise
            return None


def _may_be_claimed(row: RunRow, now: int) -> bool:
    return not row.ended and not row.held and not row.lacks_input and row.wake_at is not None and row.wake_at <= now


def _by_priority(card: Card) -> tuple[int, int]:
    return (-card.priority, card.wake_at)


def _below(taken: int, limit: int | None) -> bool:
    return limit is None or taken < limit


def _taken(turn: Turn, token: str) -> bool:
    now = time.time()
    # One that ends later than any can was taken by a clock that is far ahead.
    if turn.token and now < turn.until < now + 2 * _TURN_SECONDS:
        return turn.token == token
    turn.token, turn.until = token, now + _TURN_SECONDS
    return True


def _given_back(turn: Turn, token: str) -> None:
    if turn.token == token:
        turn.token = ""

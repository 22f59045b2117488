"""From cards and badges to runs: in which order, and whether a card still is the run's.

One may be left over from a crash, or be that of a change that is under way right now. What the run's document disowns is
ignored, and taken away when it is certain that nobody is about to make it the run's. Alone in a place, that is known at once;
where others write too, the document is written once more first, so that whoever was about to must begin again, with another card.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from itertools import groupby
from typing import Any, Final, NamedTuple

from perdure.backends.key_value.cards import BADGES, DUE, LEASED, SHELVES, Badge, Card, begin_of, bucket
from perdure.backends.key_value.document import Document, names_of
from perdure.backends.key_value.lanes import Lanes
from perdure.backends.key_value.place import Kept, Place, each
from perdure.backends.key_value.run import Run
from perdure.errors import SnapshotCorrupt
from perdure.model.records import RunRow

_AT_ONCE: Final = 32
# In how many spans of the future it is looked what comes next.
_SPANS: Final = 4
# How long what belongs to nobody is left to whoever may just be putting it down, in seconds.
_GRACE: Final = 5.0
_SUSPECTS: Final = 10_000


class Owned(NamedTuple):
    """A card, and the run it is the card of."""

    card: Card
    document: Document
    row: RunRow


class Seen(NamedTuple):
    """A run as its cards and badges show it. While it changes it may have several, or no card that was seen."""

    run: str
    begins: bytes
    cards: list[Card]
    badges: list[Badge]

    @property
    def names(self) -> list[str]:
        """Of all of them."""
        return [card.name for card in self.cards] + [badge.name for badge in self.badges]


class Finder:
    """The cards and badges of one place."""

    def __init__(self, place: Place, lanes: Lanes) -> None:
        self._place = place
        self._lanes = lanes
        # Cards and badges that belonged to nobody, and when that was first seen.
        self._suspects: dict[str, float] = {}

    async def all(self) -> list[Seen]:
        """Every run that there was from beginning to end of the look, and some of the others."""
        *shelves, all_badges = await each(lambda shelf: self._place.names.within(f"{shelf}/"), (*SHELVES, BADGES))
        cards: defaultdict[str, list[Card]] = defaultdict(list)
        badges: defaultdict[str, list[Badge]] = defaultdict(list)
        for card in (card for names in shelves for card in _cards(names)):
            cards[card.run].append(card)
        for badge in (badge for name in all_badges if (badge := Badge.read(name)) is not None):
            badges[badge.run].append(badge)
        begins = {run: some[0].begins for run, some in cards.items()} | {run: some[0].begins for run, some in badges.items()}
        return [Seen(run, begun, cards.get(run, []), badges.get(run, [])) for run, begun in begins.items()]

    def sure(self, seen: Seen) -> Card | None:
        """The card that needs no second look: the run has no other, and it was not somebody else's when it was last looked at."""
        if len(seen.cards) != 1 or len(seen.badges) != 1 or any(name in self._suspects for name in seen.names):
            return None
        return seen.cards[0]

    async def row(self, seen: Seen) -> RunRow | None:
        """The run's row, whichever card it has by now; None when there is no run or it cannot be read."""
        kept = await self._document(seen.run, seen.names)
        return None if kept is None else kept.document.row

    async def shelf(self, shelf: str) -> list[Card]:
        """Every card of a shelf."""
        return _cards(await self._place.names.within(f"{shelf}/"))

    async def timed(self, now: int) -> tuple[list[Card], list[Card]]:
        """The cards whose instant has come, and of the others at least those that come next."""
        spans = await self._place.names.folders(f"{DUE}/")
        past = [span for span in spans if span <= bucket(now)]
        future = [span for span in spans if span > bucket(now)]
        names = await each(lambda span: self._place.names.within(f"{DUE}/{span}/"), [*past, *future[:_SPANS]])
        cards = [card for some in names for card in _cards(some)] + await self.shelf(LEASED)
        later = [card for card in cards if card.wake_at > now]
        return [card for card in cards if card.wake_at <= now], later + _guesses(future[_SPANS : _SPANS + 1])

    async def in_order(self, cards: Iterable[Card], order: Callable[[Card], Any]) -> AsyncIterator[Owned]:
        """Those cards that are a run's, with their runs, in this order and then by id."""
        batch: list[Card] = []
        ordered = sorted(cards, key=lambda card: (order(card), card.begins))
        for _, group in groupby(ordered, key=lambda card: (order(card), card.begins)):
            batch += group
            if len(batch) >= _AT_ONCE:
                for owned in await self._owned(batch, order):
                    yield owned
                batch = []
        for owned in await self._owned(batch, order):
            yield owned

    async def _owned(self, cards: list[Card], order: Callable[[Card], Any]) -> list[Owned]:
        found = [owned for owned in await each(self._look, cards) if owned is not None]
        return sorted(found, key=lambda owned: (order(owned.card), owned.row.id))

    async def _look(self, card: Card) -> Owned | None:
        kept = await self._document(card.run, [card.name])
        row = None if kept is None else kept.document.row
        if kept is None or row is None or kept.document.card != card.name:
            return None
        return Owned(card, kept.document, row)

    async def _document(self, run: str, names: Iterable[str]) -> Kept | None:
        """The run's document, once it is clear which of these names are the run's. None also when it cannot be read."""
        try:
            kept = await self._place.document(run)
        except SnapshotCorrupt:
            return None  # it says so to whoever asks for it, and must not hold up the others
        own = names_of(None if kept is None else kept.document)
        for name in names:
            if name in own:
                self._suspects.pop(name, None)
            else:
                await self._suspect(run, name)
        if kept is not None and own:
            self._lanes.know(run, kept)
        return kept

    async def _suspect(self, run: str, name: str) -> None:
        """Take away what belongs to nobody, if it has done so for a while."""
        if len(self._suspects) > _SUSPECTS:
            self._suspects.clear()
        seen_at = self._suspects.setdefault(name, time.monotonic())
        if self._place.is_shared and time.monotonic() - seen_at < _GRACE:
            return
        if await self._lanes.change_named(run, lambda run: self._disown(run, name)):
            await self._place.names.discard(name)
        self._suspects.pop(name, None)

    def _disown(self, run: Run, name: str) -> bool:
        if name in names_of(run.document):
            return False
        if self._place.is_shared:
            run.touch()
        return True


def _cards(names: Iterable[str]) -> list[Card]:
    return [card for name in names if (card := Card.read(name)) is not None]


def _guesses(spans: list[str]) -> list[Card]:
    """Of spans that were not looked into: that something may come at their beginning."""
    return [Card("", begin_of(span), 0, "pending", 0, "", "", b"", "") for span in spans]

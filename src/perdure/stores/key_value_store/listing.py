"""Which runs there are: `list`, `count` and `purge`, by their cards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from perdure.duration import microseconds
from perdure.records import RunInfo, RunRow, Status
from perdure.stores.key_value_store import verbs
from perdure.stores.key_value_store.cards import ENDED, Card
from perdure.stores.key_value_store.finding import Finder
from perdure.stores.key_value_store.lanes import Lanes
from perdure.stores.key_value_store.names import short


class Filter:
    """Which runs are meant."""

    def __init__(self, prefix: str, status: Status | None, workflow: str | None) -> None:
        self._prefix = prefix
        self._encoded = prefix.encode(errors="surrogatepass")
        self._status = status
        self._workflow = workflow
        self._short = None if workflow is None else short(workflow)

    def may_have(self, card: Card) -> bool:
        """Whether the card does not say that its run is none of them."""
        length = min(len(card.begins), len(self._encoded))
        return (
            card.begins[:length] == self._encoded[:length]
            and self._status in (None, card.status)
            and self._short in (None, card.workflow)
        )

    def has(self, row: RunRow) -> bool:
        """Whether this run is one of them."""
        return row.id.startswith(self._prefix) and self._status in (None, row.status) and self._workflow in (None, row.workflow)

    def decides(self, card: Card) -> bool:
        """Whether a card that may be one surely is."""
        return len(self._encoded) <= len(card.begins)


async def list_runs(finder: Finder, wanted: Filter, before: tuple[int, str] | None, limit: int) -> list[RunInfo]:
    """Runs, last changed first."""
    cards = [card for card in await finder.all() if wanted.may_have(card) and (before is None or card.updated_at <= before[0])]
    lines: list[RunInfo] = []
    async for owned in finder.in_order(cards, lambda card: -card.updated_at):
        row = owned.row
        if len(lines) >= limit:
            break
        if wanted.has(row) and (before is None or (-row.updated_at, row.id) > (-before[0], before[1])):
            lines.append(RunInfo.of(row.id, row.workflow, row.status, row.updated_at))
    return lines


async def count(finder: Finder, wanted: Filter) -> int:
    """How many runs there are. A document is looked at only where its card leaves a doubt."""
    every = await finder.all()
    of_run = Counter(card.run for card in every)
    cards = [card for card in every if wanted.may_have(card)]
    doubtful = [card for card in cards if of_run[card.run] > 1 or not wanted.decides(card) or finder.doubts(card)]
    return len(cards) - len(doubtful) + await _matching(finder, doubtful, wanted.has)


async def _matching(finder: Finder, cards: list[Card], has: Callable[[RunRow], bool]) -> int:
    return len([owned async for owned in finder.in_order(cards, lambda card: card.updated_at) if has(owned.row)])


async def purge(finder: Finder, lanes: Lanes, older_than: float, limit: int, now: int) -> int:
    """Delete ended runs, oldest first."""
    last = now - microseconds(older_than)
    old = [card for card in await finder.shelf(ENDED) if card.updated_at <= last]
    gone = 0
    async for owned in finder.in_order(old, lambda card: card.updated_at):
        if gone >= limit:
            break
        gone += await lanes.change(owned.row.id, lambda run: verbs.delete(run, ended_before=last))
    return gone

"""Which runs there are: `list`, `count` and `purge`, by their cards and badges."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from typing import Final

from perdure.backends.key_value import verbs
from perdure.backends.key_value.cards import ENDED, Card
from perdure.backends.key_value.finding import Finder, Seen
from perdure.backends.key_value.lanes import Lanes
from perdure.backends.key_value.names import short
from perdure.backends.key_value.place import each
from perdure.model.durations import microseconds
from perdure.model.records import RunInfo, RunRow, Status

_AT_ONCE: Final = 32


class Filter:
    """Which runs are meant."""

    def __init__(self, prefix: str, status: Status | None, workflow: str | None) -> None:
        self._prefix = prefix
        self._encoded = prefix.encode(errors="surrogatepass")
        self._status = status
        self._workflow = workflow
        self._short = None if workflow is None else short(workflow)

    def may_have(self, seen: Seen) -> bool:
        """Whether the beginning of the id does not say that the run is none of them."""
        length = min(len(seen.begins), len(self._encoded))
        return seen.begins[:length] == self._encoded[:length]

    def may_have_card(self, card: Card) -> bool:
        """Whether the rest of the card does not say so either."""
        return self._status in (None, card.status) and self._short in (None, card.workflow)

    def has(self, row: RunRow) -> bool:
        """Whether this run is one of them."""
        return row.id.startswith(self._prefix) and self._status in (None, row.status) and self._workflow in (None, row.workflow)

    def decides(self, card: Card) -> bool:
        """Whether a card that may be one surely is."""
        return len(self._encoded) <= len(card.begins)


async def list_runs(finder: Finder, wanted: Filter, before: tuple[int, str] | None, limit: int) -> list[RunInfo]:
    """Runs, last changed first."""
    if limit < 1:
        return []
    unsure: list[Seen] = []
    sure: list[tuple[int, Seen]] = []
    for seen in await finder.all():
        card = finder.sure(seen)
        if wanted.may_have(seen) and card is None:
            unsure.append(seen)
        elif wanted.may_have(seen) and card is not None and _is_wanted(card, wanted, before):
            sure.append((-card.updated_at, seen))
    rows = _wanted_rows(await each(finder.row, unsure), wanted, before)  # any of them may be the first or the last
    for order, batch in _batches(sure, min(limit, _AT_ONCE)):
        rows += _wanted_rows(await each(finder.row, batch), wanted, before)
        if sum(-row.updated_at <= order for row in rows) >= limit:
            break
    rows.sort(key=_order)
    return [RunInfo.of(row.id, row.workflow, row.status, row.updated_at) for row in rows[:limit]]


def _is_wanted(card: Card, wanted: Filter, before: tuple[int, str] | None) -> bool:
    return wanted.may_have_card(card) and (before is None or card.updated_at <= before[0])


def _wanted_rows(rows: Iterable[RunRow | None], wanted: Filter, before: tuple[int, str] | None) -> list[RunRow]:
    return [row for row in rows if row is not None and wanted.has(row) and (before is None or _order(row) > _after(before))]


def _batches(runs: list[tuple[int, Seen]], size: int) -> Iterator[tuple[int, list[Seen]]]:
    """These runs in order, so many at a time or some more, with the order of the last: what is equal comes together."""
    batch: list[Seen] = []
    order = 0
    for order, group in groupby(sorted(runs, key=itemgetter(0)), key=itemgetter(0)):
        batch += [seen for _, seen in group]
        if len(batch) >= size:
            yield order, batch
            batch = []
    if batch:
        yield order, batch


def _order(row: RunRow) -> tuple[int, str]:
    return (-row.updated_at, row.id)


def _after(before: tuple[int, str]) -> tuple[int, str]:
    return (-before[0], before[1])


async def count(finder: Finder, wanted: Filter) -> int:
    """How many runs there are. A document is looked at only where cards and badges leave a doubt."""
    certain, doubtful = 0, []
    for seen in await finder.all():
        if not wanted.may_have(seen):
            continue
        card = finder.sure(seen)
        if card is None or not wanted.decides(card):
            doubtful.append(seen)
        else:
            certain += wanted.may_have_card(card)
    rows = await each(finder.row, doubtful)
    return certain + sum(row is not None and wanted.has(row) for row in rows)


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

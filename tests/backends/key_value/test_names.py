"""Names in pages: bounded pages, found again after a crash at any write."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from perdure.backends.key_value.adapters import backend_of
from perdure.backends.key_value.index import PagedNames
from perdure.backends.key_value.run_document import add_to_ranges, contains, highest, numbers_above, total
from tests.backends.key_value.faulty import Died, MortalDict


def names_over(kv: MortalDict) -> PagedNames:
    return PagedNames(backend_of(kv), "x/")


def changes(count: int) -> list[tuple[str, bool]]:
    """Names in the order of time, as due keys come and go, and some that come back."""
    chance = random.Random(7)
    there: list[str] = []
    made: list[tuple[str, bool]] = []
    for n in range(count):
        if there and chance.random() < 0.45:
            made.append((there.pop(chance.randrange(len(there))), False))
        else:
            there.append(f"{chance.choice(['due', 'rest'])}/{chance.randrange(5)}/{n:05}")
            made.append((there[-1], True))
    return made


async def told(names: PagedNames, story: list[tuple[str, bool]]) -> tuple[set[str], str | None]:
    """What was acknowledged before it died, and the name it died over."""
    there: set[str] = set()
    for name, is_there in story:
        try:
            await (names.add(name) if is_there else names.discard(name))
        except Died:
            return there, name
        there = there | {name} if is_there else there - {name}
    return there, None


async def test_names_survive_a_crash_at_any_write() -> None:
    story = [(f"first/{n:04}", True) for n in range(150)] + changes(150) + [(f"first/{n:04}", False) for n in range(150)]
    whole = MortalDict()
    expected, _ = await told(names_over(whole), story)
    assert set(await names_over(MortalDict(whole.values)).within("")) == expected
    for writes in range(whole.writes):
        kv = MortalDict(writes=writes)
        there, open_name = await told(names_over(kv), story)
        found = set(await names_over(MortalDict(kv.values)).within(""))
        assert found | {open_name} == there | {open_name}, f"after {writes} writes"


async def test_a_name_costs_one_bounded_page_however_many_there_are() -> None:
    kv = MortalDict()
    names = names_over(kv)
    for n in range(2000):
        await names.add(f"due/{n % 7}/{n:05}")
    before = kv.writes
    for n in range(2000, 2050):
        await names.add(f"due/{n % 7}/{n:05}")
    assert kv.writes - before <= 50 + 6
    assert max(len(value) for key, value in kv.values.items() if "root" not in key) < 64 * 20
    assert len(await names.within("due/3/")) == len([n for n in range(2050) if n % 7 == 3])
    assert await names.folders("due/") == [str(n) for n in range(7)]


async def test_pages_without_names_are_given_up() -> None:
    kv = MortalDict()
    names = names_over(kv)
    for n in range(1000):
        await names.add(f"due/{n:05}")
        if n >= 10:
            await names.discard(f"due/{n - 10:05}")
    assert len(kv.values) <= 4


async def test_names_that_come_at_once_share_a_write() -> None:
    kv = MortalDict()
    names = names_over(kv)
    await asyncio.gather(*(names.add(f"due/{n:05}") for n in range(60)))
    assert kv.writes <= 5
    assert len(await names.within("due/")) == 60


numbers = st.lists(st.integers(0, 60))


@given(numbers, numbers)
def test_ranges_are_sets(left: list[int], right: list[int]) -> None:
    ranges = add_to_ranges(add_to_ranges([], left), right)
    expected = {*left, *right}
    assert {number for number in range(70) if contains(ranges, number)} == expected
    assert total(ranges) == len(expected)
    assert highest(ranges) == max(expected, default=0)
    assert numbers_above(ranges, 20) == {number for number in expected if number > 20}
    assert numbers_above(ranges, 20, 3) == set(sorted(number for number in expected if number > 20)[:3])
    assert all(first[1] + 1 < second[0] for first, second in pairwise(ranges))

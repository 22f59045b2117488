"""Real processes over a local directory, where one at a time may be. Those that share a bucket are in `tests/backends`."""

from __future__ import annotations

import asyncio
import random

from tests.backends.key_value.child import open_at
from tests.backends.key_value.conftest import Child, Start
from tests.campaign import times


def line(child: Child) -> list[str]:
    assert child.stdout is not None
    return child.stdout.readline().split()


async def lost(place: str, said: list[list[str]]) -> list[str]:
    """The runs of which something that was said is not there, or that are not due though their lease has ended."""
    reached: dict[str, int] = {}
    for _, run_id, seq in said:
        reached[run_id] = int(seq)
    store = open_at(place)
    await asyncio.sleep(0.1)  # the leases that the killed process left are half as long
    due = set(await store.due(limit=100_000))
    journals = {run_id: len(await store.journal(run_id)) for run_id in reached}
    await store.close()
    return [run_id for run_id, seq in reached.items() if journals[run_id] < seq or run_id not in due]


def test_nothing_is_lost_and_everything_wakes_however_often_the_one_process_is_killed(place: str, start: Start) -> None:
    said: list[list[str]] = []
    for n in range(times(100)):
        child = start("work", place, f"life-{n}")
        assert line(child) == ["ready"]
        said += [line(child) for _ in range(random.randrange(3, 25))]
        child.kill()
        assert child.stdout is not None
        said += [words for text in child.stdout if len(words := text.split()) == 3 and text.endswith("\n")]
        child.wait()
    assert asyncio.run(lost(place, said)) == []


def test_a_second_process_is_refused_where_only_one_may_be(place: str, start: Start) -> None:
    first = start("have", place)
    assert line(first) == ["ready"]
    second = start("have", place)
    told = " ".join(line(second))
    assert told.startswith("refused the key_value store has no way to serve two processes without compare-and-swap")
    assert f"process {first.pid} on host" in told
    first.kill()
    first.wait()
    assert line(start("have", place)) == ["ready"]


def test_a_place_that_was_closed_is_free_for_the_next_process(place: str, start: Start) -> None:
    async def come_and_go() -> None:
        store = open_at(place)
        await store.setup()
        await store.close()

    asyncio.run(come_and_go())
    assert line(start("have", place)) == ["ready"]

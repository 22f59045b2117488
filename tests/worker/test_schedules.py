"""Schedules: each instant starts one run, at the right time, whatever workers come and go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pytest

from perdure import Context, PersistenceError, Runtime, ScheduleInfo, ScheduleNotFound, stores, workflow
from perdure.model.durations import instant, moment
from perdure.model.recurrence import Recurrence, recurrence
from perdure.testing import ManualClock
from tests.simulation import LoopClock, MortalStore, simulate

BERLIN = ZoneInfo("Europe/Berlin")


@workflow
async def report(ctx: Context, name: str) -> str:
    """Says for when it was started."""
    return f"{name} {ctx.scheduled_at:%Y-%m-%dT%H:%M}"


@workflow
async def slow(ctx: Context) -> None:
    """Takes longer than until the next instant."""
    await ctx.sleep("work", "150m")


class Place:
    """A client runtime whose clock stands at noon, and what it has."""

    def __init__(self) -> None:
        self.clock = ManualClock(datetime(2026, 5, 4, 12, 0, 30, tzinfo=UTC))
        self.runtime = Runtime(stores.memory(), [report, slow], clock=self.clock, concurrency=0)

    async def sweep_after(self, *durations: str) -> None:
        for duration in durations:
            self.clock.advance(duration)
            await self.runtime.sweep()

    async def runs(self, prefix: str = "") -> list[str]:
        return sorted(info.id for info in await self.runtime.list(prefix=prefix))


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    made = Place()
    yield made
    await made.runtime.close()


async def test_each_instant_starts_one_run_that_knows_its_time(place: Place) -> None:
    made = await place.runtime.schedule(report, "daily", cron="0 14 * * *", tz="Europe/Berlin", id="nightly")
    assert made.next_at == datetime(2026, 5, 5, 12, 0, tzinfo=UTC)
    await place.sweep_after("23h", "59m", "30s", "1h", "23h")
    assert await place.runs() == ["nightly:2026-05-05T12:00:00Z", "nightly:2026-05-06T12:00:00Z"]
    run = await place.runtime.get("nightly:2026-05-05T12:00:00Z")
    assert run is not None
    assert await run == "daily 2026-05-05T12:00"


async def test_every_counts_from_the_first_time_it_was_put(place: Place) -> None:
    await place.runtime.schedule(report, "often", every="5m")
    await place.sweep_after("3m")
    again = await place.runtime.schedule(report, "often", every="5m")  # as a program does at each start
    assert again.next_at == datetime(2026, 5, 4, 12, 5, 30, tzinfo=UTC)
    await place.sweep_after("2m", "5m")
    assert await place.runs() == ["report:2026-05-04T12:05:30Z", "report:2026-05-04T12:10:30Z"]
    changed = await place.runtime.schedule(report, "often", every="1h")
    assert changed.next_at == datetime(2026, 5, 4, 13, 10, 30, tzinfo=UTC)


@pytest.mark.parametrize(("catch_up", "expected"), [("last", ["16"]), ("all", ["13", "14", "15", "16"]), ("none", [])])
async def test_what_is_made_up_for_after_a_time_without_workers(place: Place, catch_up: Any, expected: list[str]) -> None:
    await place.runtime.schedule(report, "x", cron="0 * * * *", catch_up=catch_up, overlap="allow")
    await place.sweep_after("4h30m")
    assert [run_id.partition("T")[2][:2] for run_id in await place.runs()] == expected
    await place.sweep_after("29m40s")
    assert [run_id.partition("T")[2][:2] for run_id in await place.runs()] == [*expected, "17"]


async def test_overlap_skips_allows_or_waits(place: Place) -> None:
    for overlap in ("skip", "allow", "queue"):
        await place.runtime.schedule(slow, cron="0 * * * *", id=overlap, overlap=overlap)
    await place.sweep_after(*["10m"] * 36)  # 12:00:30 to 18:00:30; a run takes two and a half hours
    hours = {name: [run_id[-9:-4] for run_id in await place.runs(f"{name}:")] for name in ("skip", "allow", "queue")}
    assert hours["allow"] == ["13:00", "14:00", "15:00", "16:00", "17:00", "18:00"]
    assert hours["skip"] == ["13:00", "16:00"]
    assert hours["queue"] == ["13:00", "15:00"]  # the second, the last that waited, started when the first had ended


async def test_a_schedule_whose_id_begins_alike_does_not_count_as_overlap(place: Place) -> None:
    await place.runtime.schedule(slow, cron="0 * * * *", id="a:b")
    await place.sweep_after("1h")
    await place.runtime.schedule(report, "x", cron="30 * * * *", id="a")
    await place.sweep_after("1h")
    assert await place.runs("a:2") == ["a:2026-05-04T13:30:00Z"]


async def test_hold_unhold_run_now_and_drop(place: Place) -> None:
    runtime = place.runtime
    await runtime.schedule(report, "x", cron="0 * * * *", id="s")
    await runtime.hold_schedule("s")
    await place.sweep_after("3h")
    (held,) = await runtime.schedules()
    assert (held.held, held.next_at, await place.runs()) == (True, None, [])
    await runtime.schedule(report, "y", cron="0 * * * *", id="s")  # a deploy while it is on hold
    assert (await runtime.schedules())[0].held
    run = await runtime.run_schedule("s")
    await runtime.sweep()
    assert await run == "y 2026-05-04T15:00"
    await runtime.unhold_schedule("s")
    assert (await runtime.schedules())[0].next_at == datetime(2026, 5, 4, 16, 0, tzinfo=UTC)
    await place.sweep_after("1h")
    assert await place.runs() == ["s:2026-05-04T15:00:30Z", "s:2026-05-04T16:00:00Z"]
    assert await runtime.drop_schedule("s")
    assert not await runtime.drop_schedule("s")
    for verb in (runtime.hold_schedule, runtime.unhold_schedule, runtime.run_schedule):
        with pytest.raises(ScheduleNotFound, match="'s'"):
            await verb("s")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({}, "one of them"),
        ({"cron": "0 3 * * *", "every": 60}, "one of them"),
        ({"cron": "0 3 * *"}, "cannot be read"),
        ({"cron": "0 3 31 2 *"}, "cannot be read"),
        ({"cron": "0 3 * * *", "tz": "Mars/Olympus"}, "no time zone 'Mars/Olympus'"),
        ({"cron": "0 3 * * *", "tz": "../../etc/passwd"}, "no time zone"),
        ({"cron": 3}, "are texts"),
        ({"every": "1ms"}, "at least a second"),
        ({"every": 60, "tz": "UTC"}, "tz= is for cron="),
        ({"every": 60, "overlap": "never"}, "overlap is one of skip, allow, queue"),
        ({"every": 60, "catch_up": "some"}, "catch_up is one of last, all, none"),
        ({"every": 60, "start_at": 3}, "has no option start_at"),
        ({"every": 60, "id": ""}, "id"),
        ({"every": 60, "id": "x" * 1020}, "at most 1024 UTF-8 bytes"),
    ],
)
async def test_a_bad_schedule_is_refused_and_nothing_is_written(place: Place, options: Any, error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        await place.runtime.schedule(report, "x", **options)
    assert await place.runtime.schedules() == []


async def test_two_workers_that_race_start_each_run_once() -> None:
    clock = ManualClock(datetime(2026, 5, 4, 12, 0, 30, tzinfo=UTC))
    store = stores.memory()
    runtimes = [Runtime(store, [report], clock=clock, concurrency=0) for _ in range(4)]
    await runtimes[0].schedule(report, "x", cron="* * * * *")
    for _ in range(20):
        clock.advance("1m")
        await asyncio.gather(*(runtime.sweep() for runtime in runtimes))
    assert len(await runtimes[0].list()) == 20
    for runtime in runtimes:
        await runtime.close()


@pytest.mark.parametrize("after_commit", [False, True])
@pytest.mark.parametrize("day", ["03-28", "10-24"])
async def test_each_instant_has_one_run_whenever_a_worker_dies(day: str, *, after_commit: bool) -> None:
    """Two workers race through a daylight-saving change, and one dies at its n-th write, for each n."""
    start = datetime.fromisoformat(f"2026-{day}T21:00:00").replace(tzinfo=BERLIN)
    expected: list[str] | None = None
    for dies_at in range(100):
        clock, store = ManualClock(start.astimezone(UTC)), stores.memory()
        mortal: Any = MortalStore(store, dies_at, after_commit=after_commit)
        runtimes = [Runtime(each, [report], clock=clock, concurrency=0) for each in (mortal, store)]
        await runtimes[1].schedule(report, "x", cron="30 * * * *", tz="Europe/Berlin", id="hourly", overlap="allow")
        await runtimes[1].schedule(report, "y", cron="30 2 * * *", tz="Europe/Berlin", id="daily")
        for _ in range(8):
            clock.advance("1h")
            await asyncio.gather(*(runtime.sweep() for runtime in runtimes), return_exceptions=True)
        clock.advance("1m")  # past the lease of the one that died
        await runtimes[1].sweep()
        runs = await runtimes[1].list()
        assert {info.status for info in runs} == {"completed"}
        found = sorted(info.id for info in runs)
        expected = expected or found
        assert found == expected
        for runtime in runtimes:
            await runtime.close()
        if mortal.writes_left >= 0:  # it survived
            break
    else:
        pytest.fail("there were more writes than were tried")
    assert len(expected or ()) == 9


async def _work_for_five_minutes(store: Any) -> list[ScheduleInfo]:
    async with Runtime(store, [report], clock=LoopClock()) as runtime:
        await asyncio.sleep(5)
        await runtime.schedule(report, "x", every="1m")
        await asyncio.sleep(301)
        assert len(await runtime.list(status="completed")) == 5
        return await runtime.schedules()


def test_a_worker_fires_by_itself() -> None:
    (left,) = simulate(_work_for_five_minutes(stores.memory()))
    assert left.every == timedelta(minutes=1)


async def test_a_schedule_that_cannot_be_read_holds_up_no_other(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    await place.runtime.schedule(report, "x", cron="0 * * * *", id="b")
    store: Any = place.runtime.store
    (good,) = await store.schedules()
    await store.put_schedule(msgspec.structs.replace(good, id="a", spec='{"when": {"cron": "nonsense"}, "input_hash": ""}'))
    await store.put_schedule(msgspec.structs.replace(good, id="c", spec="nonsense"))
    await place.sweep_after("1h", "1h")
    assert await place.runs() == ["b:2026-05-04T13:00:00Z", "b:2026-05-04T14:00:00Z"]


def _local(at: int) -> str:
    return f"{moment(at).astimezone(BERLIN):%m-%d %H:%M %Z}"


@pytest.mark.parametrize(
    ("cron", "day", "expected"),
    [
        # 02:30 does not exist on 29 March 2026 in Berlin, and exists twice on 25 October.
        ("30 2 * * *", "03-28", ["03-28 02:30 CET", "03-29 03:00 CEST", "03-30 02:30 CEST"]),
        ("30 2 * * *", "10-24", ["10-24 02:30 CEST", "10-25 02:30 CEST", "10-26 02:30 CET"]),
        ("0 */12 * * *", "10-24", ["10-24 00:00 CEST", "10-24 12:00 CEST", "10-25 00:00 CEST", "10-25 12:00 CET"]),
        ("30 * * * *", "10-25", ["10-25 00:30 CEST", "10-25 01:30 CEST", "10-25 02:30 CEST", "10-25 02:30 CET"]),
    ],
)
def test_cron_is_right_over_daylight_saving_changes(cron: str, day: str, expected: list[str]) -> None:
    when = recurrence(cron, None, "Europe/Berlin", 0)
    at = instant(datetime.fromisoformat(f"2026-{day}T00:00:00").replace(tzinfo=BERLIN)) - 1
    found = []
    for _ in expected:
        following = when.after(at)
        assert following is not None
        assert following > at
        found.append(_local(at := following))
    assert found == expected


@pytest.mark.parametrize("cron", ["* * * * *", "*/7 * * * *", "30 2 * * *", "0 0 1 * *", "15 10 * * 1", "0 0 29 2 *"])
def test_the_latest_instant_is_the_one_that_walking_finds(cron: str) -> None:
    when = Recurrence(cron=cron, tz="Europe/Berlin")
    for month in (1, 3, 10):
        now = instant(datetime(2026, month, 29, 3, 30, 17, tzinfo=UTC))
        start = now - (2 if "*" in cron[:3] else 40 if cron != "0 0 29 2 *" else 9999) * 86_400 * 1_000_000
        first = walked = when.after(start)
        assert first is not None
        assert walked is not None
        if first > now:
            continue
        while (following := when.after(walked)) is not None and following <= now:
            walked = following
        assert when.latest(first, now) == walked


async def test_sleep_until_the_next_time_of_a_cron_expression(place: Place) -> None:
    @workflow
    async def weekday(ctx: Context) -> datetime:
        await ctx.sleep_until("morning", cron="0 9 * * 1-5", tz="Europe/Berlin")
        return ctx.now()

    run = await place.runtime.start(weekday)
    await place.sweep_after("0s", "18h")
    assert await run.status() == "suspended"
    await place.sweep_after("1h")
    assert (await run).astimezone(BERLIN).replace(microsecond=0) == datetime(2026, 5, 5, 9, 0, 30, tzinfo=BERLIN)


async def test_a_store_that_is_down_is_logged_once_by_its_schedules(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("perdure.worker.scheduler.LOOK_SECONDS", 0.05)
    store, looks = stores.memory(), 0

    async def fail() -> Any:
        nonlocal looks
        looks += 1
        raise PersistenceError("the store", "is down")

    monkeypatch.setattr(store, "schedules", fail)
    async with Runtime(store, [report]), asyncio.timeout(30):
        while looks < 5:  # noqa: ASYNC110 - what is looked at has no event
            await asyncio.sleep(0.01)
    assert len([record for record in caplog.records if "schedules could not be looked at" in record.getMessage()]) == 1

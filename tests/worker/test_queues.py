"""Queues with limits: set in code or while workers run, kept by every way to start a run, and cheap to wait for."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from perdure import Context, Ok, Queue, Runtime, Suspended, Workflow, workflow
from perdure.errors import StoreCapabilityError
from perdure.model.records import Claims, QueueLimits
from perdure.store import FullStore, Store, require
from perdure.testing import ManualClock
from perdure.worker import worker_registry
from perdure.worker.queues import parse_rate, rate_text
from tests.patience import PATIENCE
from tests.worker.flows import Gate, client, greet, reaches, soon

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "queues.py"


class Meter:
    """A workflow whose step says how many of it run at once, in all and for each key."""

    def __init__(self) -> None:
        self.running: list[str] = []
        self.most = 0
        self.most_of_a_key = 0

        async def flow(ctx: Context, key: str) -> str:
            return await ctx.step("work", self._work, key)

        self.flow: Workflow[[str], str] = Workflow("metered", flow)

    async def _work(self, key: str) -> str:
        self.running.append(key)
        self.most = max(self.most, len(self.running))
        self.most_of_a_key = max(self.most_of_a_key, self.running.count(key))
        await asyncio.sleep(0.005)
        self.running.remove(key)
        return key


@contextlib.contextmanager
def counted_claims(store: Store, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The claims that workers ask this store for, and how many runs each gave."""
    claim: Callable[..., Awaitable[Claims]] = store.claim
    counted: list[int] = []

    async def count(limit: int, *args: Any, **options: Any) -> Claims:
        claims = await claim(limit, *args, **options)
        if limit:
            counted.append(len(claims.claims))
        return claims

    monkeypatch.setattr(store, "claim", count, raising=False)
    yield counted


@contextlib.asynccontextmanager
async def full_queue(store: FullStore, name: str = "mail") -> AsyncIterator[Gate]:
    """A queue with room for one run, which is taken as long as the gate is closed."""
    gate = Gate("holder")
    async with Runtime(store, [gate.flow], queues=[Queue(name, concurrency=1)]) as runtime, asyncio.timeout(PATIENCE):
        held = await runtime.start(gate.flow, queue=name)
        await gate.reached.wait()
        yield gate
        gate.opened.set()
        await held


@pytest.mark.parametrize(
    ("rate", "interval"),
    [
        ("10/s", 100_000),
        ("1 / s", 1_000_000),
        ("3/s", 333_334),
        ("30/m", 2_000_000),
        ("600/h", 6_000_000),
        ("1/d", 86_400 * 10**6),
    ],
)
def test_a_rate_is_so_many_starts_in_a_time(rate: str, interval: int) -> None:
    assert parse_rate(rate) == Queue("mail", rate=rate).limits.interval == interval
    assert parse_rate(rate_text(interval)) == interval


def test_a_rate_reads_back_as_it_was_given() -> None:
    for unit in "smhd":
        for number in (1, 2, 3, 7, 10, 59, 60, 61, 100, 999):
            assert parse_rate(rate_text(parse_rate(f"{number}/{unit}"))) == parse_rate(f"{number}/{unit}")
    assert rate_text(parse_rate("7/s")) == "7/s"
    assert rate_text(parse_rate("60/m")) == "1/s"
    assert parse_rate(rate_text(1_234_567)) >= 1_234_567


@pytest.mark.parametrize(
    ("limits", "error", "text"),
    [
        ({"rate": "fast"}, ValueError, "'fast' must be a whole number per second"),
        ({"rate": "0.5/s"}, ValueError, '"30/m"'),
        ({"rate": "0/s"}, ValueError, "at least 1"),
        ({"rate": "2000000/s"}, ValueError, "at most 1000000/s"),
        ({"rate": 10}, TypeError, 'rate is text, such as "10/s"'),
        ({"concurrency": 0}, ValueError, "concurrency must be a whole number of at least 1, not 0"),
        ({"concurrency": True}, ValueError, "concurrency must be a whole number"),
        ({"per_key": 1.5}, ValueError, "per_key must be a whole number"),
        ({"per_key": -1}, ValueError, "per_key must be a whole number"),
        ({"concurrency": 2**31}, ValueError, "concurrency must be at most"),
    ],
)
def test_what_is_no_limit_is_refused_with_what_to_write(limits: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text.replace("(", r"\(")):
        Queue("mail", **limits)


@pytest.mark.parametrize(
    ("queues", "error", "text"),
    [
        ("mail", TypeError, 'only_queues=["mail"]'),
        (["mail"], TypeError, 'only_queues=["mail"]'),
        ([Queue("mail"), "slow"], TypeError, 'only_queues=["slow"]'),
        ([1], TypeError, "takes Queue("),
        (3, TypeError, "takes Queue("),
        (Queue("mail"), TypeError, "takes a list of queues: [Queue(name='mail'"),
        ([Queue("a"), Queue("a")], ValueError, "has 'a' twice"),
    ],
)
def test_queues_takes_limits_and_says_where_names_go(queues: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        Runtime("memory:", queues=queues)


@pytest.mark.parametrize(
    ("names", "error", "text"),
    [
        ("mail", TypeError, "only_queues= takes a list of queue names, such as ['mail'], not 'mail'"),
        (3, TypeError, "not 3"),
        ([], ValueError, "would take no run"),
        ([""], ValueError, "a queue's name"),
        ([1], TypeError, "a queue's name must be a str"),
        ([Queue("mail")], TypeError, "takes names, such as 'mail'"),
    ],
)
def test_only_queues_takes_names_of_which_there_is_one(names: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        Runtime("memory:", only_queues=names)


@pytest.mark.usefixtures("_no_polling")
async def test_a_queue_with_limits_stops_no_other(store: Store) -> None:
    async with asyncio.timeout(PATIENCE), Runtime(store, [greet], queues=[Queue("mail", concurrency=3)]) as runtime:
        assert await (await runtime.start(greet, "Ada")) == "hello Ada!"
        assert await (await runtime.start(greet, "Bob", queue="mail")) == "hello Bob!"


async def test_a_worker_takes_runs_of_its_queues_only(store: Store) -> None:
    async with client(store, greet) as other, asyncio.timeout(PATIENCE):
        left = await other.start(greet, "Ada")
        async with Runtime(store, [greet], only_queues=["mail"]) as runtime:
            assert await (await other.start(greet, "Bob", queue="mail")) == "hello Bob!"
            assert await runtime.sweep() == {}
        assert await left.status() == "pending"


@pytest.fixture
def _shows_itself_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_registry, "FIRST_AFTER", 0.0)


@pytest.mark.usefixtures("_shows_itself_at_once")
async def test_a_queue_that_no_worker_takes_is_reported_once_and_why_its_runs_are_stuck(
    store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perdure.worker.worker.LOOK_FOR_UNCLAIMED_SECONDS", (0.0, 0.0))
    clock, looked, due = ManualClock(), list[int](), require(store, "operators").due

    async def noted_due(**options: Any) -> Any:
        looked.append(1)
        return await due(**options)

    monkeypatch.setattr(store, "due", noted_due, raising=False)
    async with client(store, greet, clock=clock) as other, asyncio.timeout(PATIENCE):
        for n in range(2):
            await other.start(greet, "Ada", queue="post", id=f"p{n}")
        clock.advance("61s")
        async with Runtime(store, [greet], only_queues=["mail", "default"], clock=clock) as runtime:
            await runtime.workers()
            await soon(lambda: asyncio.sleep(0, "no worker takes" in caplog.text))
            (first, second) = await runtime.stuck_runs()
            assert first.problem == second.problem == "due for 61 s, and no worker takes its queue 'post'"
            seen = len(looked)
            await (await runtime.start(greet, "Bob"))  # the worker looks again
            await soon(lambda: asyncio.sleep(0, len(looked) > seen + 1))
        (told,) = [record.message for record in caplog.records if "no worker takes" in record.message]
        assert told.startswith("runs in queue 'post', such as 'p0', are due and no worker takes this queue; start one without ")


@pytest.mark.parametrize("interval", [0, -1, True, 1.5, 86_400 * 10**6 + 1])
def test_an_interval_is_a_whole_number_of_microseconds(interval: Any) -> None:
    with pytest.raises(ValueError, match="interval"):
        QueueLimits(interval=interval)


async def test_the_limits_of_queues_are_set_at_the_start_and_names_change_nothing(store: Store) -> None:
    mail = Queue("mail", concurrency=5, per_key=1, rate="10/s")
    async with Runtime(store, queues=[mail], only_queues=["other"], concurrency=0) as runtime:
        assert await runtime.queues() == [mail]
    async with Runtime(store, queues=[Queue("other", rate="2/m")], only_queues=["mail"]) as runtime:
        assert await runtime.queues() == [mail, Queue("other", rate="2/m")]
        await runtime.set_queue(Queue("mail", concurrency=2))
        assert await runtime.queues() == [Queue("mail", concurrency=2), Queue("other", rate="2/m")]
        await runtime.set_queue(Queue("mail"))
        assert [queue.name for queue in await runtime.queues()] == ["other"]
        with pytest.raises(TypeError, match="takes a Queue"):
            await runtime.set_queue("mail")  # type: ignore[arg-type]


async def test_a_worker_in_the_foreground_sets_limits_too(store: Store) -> None:
    runtime = Runtime(store, [greet], queues=[Queue("mail", concurrency=3)])
    working = asyncio.create_task(runtime.work())

    async def has_limits() -> bool:
        return await runtime.queues() == [Queue("mail", concurrency=3)]

    await soon(has_limits)
    working.cancel()
    await asyncio.wait([working])
    await runtime.close()


async def test_workers_keep_to_a_limit_together(store: Store) -> None:
    meter, sibling = Meter(), store.sibling()
    queues = [Queue("mail", concurrency=3, per_key=1)]
    async with (
        asyncio.timeout(PATIENCE),
        Runtime(store, [meter.flow], queues=queues) as first,
        Runtime(sibling, [meter.flow], queues=queues) as second,
    ):
        keys = enumerate("abcab" * 4)
        starts = [(first, second)[n % 2].start(meter.flow, key, queue="mail", limit_key=key) for n, key in keys]
        for run in await asyncio.gather(*starts):
            assert await run in "abc"
    assert (meter.most, meter.most_of_a_key) == (3, 1)
    await sibling.close()


@pytest.mark.usefixtures("_no_polling")
async def test_a_run_of_a_limited_queue_is_claimed_at_once_when_there_is_room(store: Store) -> None:
    async with asyncio.timeout(PATIENCE), Runtime(store, [greet], queues=[Queue("mail", concurrency=1)]) as runtime:
        for n in range(3):
            assert await (await runtime.start(greet, "Ada", id=f"s{n}", queue="mail")) == "hello Ada!"
            assert await runtime.run(greet, "Bob", id=f"r{n}", queue="mail") == Ok("hello Bob!")


async def test_run_and_start_wait_for_their_turn_in_a_full_queue(store: FullStore) -> None:
    async with full_queue(store) as gate, client(store, greet) as other:
        calls: dict[str, Awaitable[Any]] = {
            "runtime.run": other.run(greet, "Ada", queue="mail", id="by-runtime"),
            "wf.run": greet.run("Ada", "!", queue="mail", id="by-run", store=store),
            "await": _start_and_await(greet.options(queue="mail", id="by-start", store=store)),
            "resume": _start_and_resume(other),
        }
        waiting = {name: asyncio.ensure_future(call) for name, call in calls.items()}
        for name in ("runtime", "run", "start", "resume"):
            await reaches(store, f"by-{name}", "pending")
        await asyncio.sleep(0.05)
        assert {name for name, call in waiting.items() if call.done()} == set()
        gate.opened.set()
        done = dict(zip(waiting, await asyncio.gather(*waiting.values()), strict=True))
        assert done == {name: "hello Ada!" if name == "await" else Ok("hello Ada!") for name in calls}


async def _start_and_await(configured: Any) -> str:
    value: str = await (await configured.start("Ada"))
    return value


async def _start_and_resume(other: Runtime) -> Any:
    await other.start(greet, "Ada", queue="mail", id="by-resume")
    return await other.resume("by-resume")


async def test_a_run_that_does_not_wait_gives_its_state(store: FullStore) -> None:
    async with full_queue(store):
        outcome = await greet.run("Ada", "!", queue="mail", id="impatient", store=store, wait=False)
        assert isinstance(outcome, Suspended)
        assert outcome.run_id == "impatient"


async def test_waiting_for_a_turn_does_not_spin(store: FullStore, monkeypatch: pytest.MonkeyPatch) -> None:
    acquires: list[str] = []
    acquire = store.acquire

    async def count(run_id: str, *args: Any, **options: Any) -> Any:
        acquires.append(run_id)
        return await acquire(run_id, *args, **options)

    async with full_queue(store):
        monkeypatch.setattr(store, "acquire", count, raising=False)
        waiting = [asyncio.ensure_future(greet.run("Ada", "!", queue="mail", id="waits", store=store))]
        started = await greet.start("Ada", "!", queue="mail", id="waits-too", store=store)
        await asyncio.sleep(0.3)
        assert len(acquires) < 10
    assert await asyncio.gather(*waiting) == [Ok("hello Ada!")]
    assert await started == "hello Ada!"


@pytest.mark.usefixtures("_no_polling")
async def test_more_room_and_no_limit_take_effect_while_workers_run(store: FullStore) -> None:
    async with full_queue(store), Runtime(store, [greet], only_queues=["mail"]) as runtime:
        first = await runtime.start(greet, "Ada", queue="mail")
        await asyncio.sleep(0.02)
        assert await first.status() == "pending"
        await runtime.set_queue(Queue("mail", concurrency=2))
        assert await first == "hello Ada!"
        await runtime.set_queue(Queue("mail"))
        assert await (await runtime.start(greet, "Bob", queue="mail")) == "hello Bob!"


@pytest.mark.usefixtures("_no_polling")
async def test_a_suspended_run_makes_room(store: Store) -> None:
    @workflow
    async def asks(ctx: Context) -> Any:
        return await ctx.wait_for_signal("answer")

    async with (
        asyncio.timeout(PATIENCE),
        Runtime(store, [asks, greet], queues=[Queue("mail", concurrency=1)], unload_grace=0) as runtime,
    ):
        asking = await runtime.start(asks, queue="mail")
        assert await (await runtime.start(greet, "Ada", queue="mail")) == "hello Ada!"
        await asking.signal("answer", 42)
        assert await asking == 42


@pytest.mark.usefixtures("_no_polling")
async def test_a_worker_starts_runs_at_their_rate_and_asks_no_more_often(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, started = ManualClock(), list[str]()

    @workflow
    async def noted(ctx: Context, name: str) -> None:
        await ctx.step("note", lambda: started.append(name))

    async with client(store, noted, clock=clock) as other:
        await other.set_queue(Queue("mail", rate="1/m"))
        runs = [await other.start(noted, name, queue="mail", id=name) for name in "abcde"]
    with counted_claims(store, monkeypatch) as claims:
        async with asyncio.timeout(PATIENCE), Runtime(store, [noted], only_queues=["mail"], clock=clock, lease_ttl=3600):
            await runs[0]
            for n in range(1, 5):
                clock.advance(59)
                await asyncio.sleep(0.02)
                assert started == list("abcde"[:n])
                clock.advance(1)
                await runs[n]
        assert started == list("abcde")
        # For each run: the claim that gave it, and the one after its end. Changes of the store add a few.
        assert len(claims) <= 20


async def test_a_claim_that_a_rate_cut_short_is_repeated_when_the_next_run_may_start(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with client(store, greet) as other:
        await other.set_queue(Queue("mail", rate="40/s"))
        runs = [await other.start(greet, "Ada", queue="mail") for _ in range(12)]
    with counted_claims(store, monkeypatch) as claims:
        async with asyncio.timeout(PATIENCE), Runtime(store, [greet], only_queues=["mail"]):
            await asyncio.gather(*(run.outcome() for run in runs))
        assert set(claims) <= {0, 1}
        assert sum(claims) == 12
        assert len(claims) <= 4 * 12
    rows = [await store.get(run.id) for run in runs]
    starts = sorted(row.epoch for row in rows if row is not None)  # the instant of the first lease, which no other followed
    assert all(later - earlier >= 25_000 for earlier, later in itertools.pairwise(starts))


async def test_a_limit_key_is_stored_with_the_run_and_with_a_schedule(store: FullStore) -> None:
    async with client(store, greet) as other:
        await other.start(greet, "Ada", id="keyed", limit_key="ada")
        row = await store.get("keyed")
        assert row is not None
        assert row.limit_key == "ada"
        made = await other.schedule(greet, "Bob", every="1h", queue="mail", limit_key="bob")
        assert made.limit_key == "bob"
        scheduled = await store.get((await other.run_schedule(made.id)).id)
        assert scheduled is not None
        assert (scheduled.queue, scheduled.limit_key) == ("mail", "bob")
        for wrong in (1, "", "\0", b"ada"):
            with pytest.raises((TypeError, ValueError), match="limit key"):
                await other.start(greet, "Ada", limit_key=wrong)  # type: ignore[arg-type]  # that is the point


async def test_a_store_without_queue_limits_says_so() -> None:
    class Plain:
        capabilities: frozenset[str] = frozenset()

    with pytest.raises(StoreCapabilityError, match="queue limits"):
        require(Plain(), "schedules")  # type: ignore[call-overload]  # that is the point


def test_the_example_keeps_to_its_limits() -> None:
    done = subprocess.run([sys.executable, "-W", "error", str(EXAMPLE)], capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr == ""
    letters, most, speed, limits = done.stdout.splitlines()[:13], *done.stdout.splitlines()[13:]
    assert len(set(letters)) == 13
    assert (most, speed) == ("at most 2 at once, 1 to one customer", "no faster than 20 a second: True")
    assert limits == "Queue(name='mail', concurrency=10, per_key=None, rate=None)"

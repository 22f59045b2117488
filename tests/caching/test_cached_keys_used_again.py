"""A cached key used again in one run returns what the first use returned, and a replay sees the same in the same order."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from perdure import Context, Err, Ok, Retry, Runtime, Suspended, Workflow, stores
from perdure.engine import step_cache as caching
from perdure.errors import DuplicateStep, PersistenceError
from perdure.events import Event
from perdure.store import Store
from tests.caching.cached import CACHES, HOURLY, Body, Counted, Gated, OwnCache, flow, forget, until
from tests.campaign import IS_FULL, times
from tests.engine.replays import twice
from tests.engine.worlds import world
from tests.patience import PATIENCE
from tests.simulation import LoopClock, MortalStore, SlowStore, simulate


@pytest.fixture(params=CACHES)
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return CACHES[request.param](tmp_path)


@pytest.fixture(params=["memory", "sqlite"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    opened = stores.memory() if request.param == "memory" else await asyncio.to_thread(stores.sqlite, tmp_path / "app.db")
    yield opened
    await opened.close()


@pytest.fixture(autouse=True)
def no_flight_is_left() -> Iterator[None]:
    yield
    assert caching._flights == {}


async def test_without_a_cache_a_second_use_is_a_duplicate_step() -> None:
    async def body(ctx: Context[Any]) -> None:
        await ctx.step("s", Counted(), key="s")
        await ctx.step("s", Counted(), key="s")

    for wf in (flow(body), flow(body, cache=None)):
        outcome = await wf.run()
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, DuplicateStep)


@pytest.mark.parametrize("first", [True, False])
async def test_a_use_outside_the_cache_and_one_inside_are_a_duplicate_step(first: bool) -> None:
    async def body(ctx: Context[Any]) -> None:
        for is_cached in (first, not first):
            await (ctx.step("s", Counted(), key="s") if is_cached else ctx.step("s", Counted(), cache=False))

    async def with_sleep(ctx: Context[Any]) -> None:
        await ctx.sleep("s", 0)
        await ctx.step("s", Counted(), key="s")

    for each in (body, with_sleep):
        outcome = await flow(each, cache={}).run()
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, DuplicateStep)


async def test_a_second_use_returns_the_first_result_and_adds_no_entry(store: Store, cache: Any) -> None:
    fn = Counted()

    async def body(ctx: Context[Any]) -> Any:
        found = [await ctx.step("s", fn, key="s"), await ctx.step("other", fn, key="other"), await ctx.step("s", fn, key="s")]
        await ctx.sleep("nap", "1h")
        return [*found, await ctx.step("s", fn, key="s")]

    async with world(flow(body, cache=cache), store=store) as here:
        await here.runtime.run("flow", id="r")
        await forget(cache, "s")
        assert await here.later("1h") == {"r": Ok(["first", "second", "first", "first"])}
        assert await here.keys("r") == ["s", "other", "nap"]
    assert fn.calls == 2


class Seen:
    """What the branches of a body saw, in the order in which they saw it."""

    def __init__(self) -> None:
        self.log: list[tuple[str, Any]] = []

    async def use(self, who: str, call: Awaitable[Any]) -> Any:
        try:
            value = await call
        except Exception as error:
            value = repr(error)
        self.log.append((who, value))
        return value


@pytest.mark.parametrize("uses", [2, 3, 4, 5])
@pytest.mark.parametrize("gives", [["value"], [ValueError("no")], [Err("NO")]])
async def test_uses_at_once_get_the_first_result_in_the_order_in_which_they_came(uses: int, gives: list[Any]) -> None:
    fn = Counted(*gives)

    async def body(ctx: Context[Any]) -> Any:
        seen = Seen()

        async def user(n: int) -> None:
            await seen.use(f"before {n}", ctx.step("plain", Counted(), key=f"before {n}"))
            await seen.use(f"user {n}", ctx.step("s", fn, key="s"))
            await seen.use(f"after {n}", ctx.step("plain", Counted(), key=f"after {n} {len(seen.log)}"))
            await seen.use(f"again {n}", ctx.step("s", fn, key="s"))

        await asyncio.gather(*map(user, range(uses)))
        return seen.log

    first, second = await twice(body, cache={})
    assert first == second
    assert fn.calls == 1
    users = [who for who, _ in first if who.startswith("user")]
    assert users == [f"user {n}" for n in range(uses)]
    assert len({str(value) for who, value in first if who.startswith(("user", "again"))}) == 1


async def test_calls_that_wait_get_the_record_right_after_the_first_and_before_any_other() -> None:
    gate = Gated()

    async def body(ctx: Context[Any]) -> Any:
        seen = Seen()
        uses = [seen.use(f"user {n}", ctx.step("s", gate, key="s")) for n in range(4)]
        tasks = [asyncio.ensure_future(use) for use in [*uses, seen.use("other", ctx.step("other", lets_go, key="other"))]]
        await asyncio.gather(*tasks)
        return [who for who, _ in seen.log]

    async def lets_go() -> None:
        gate.may_end.set()  # so that both end in one turn of the loop
        await asyncio.sleep(0)

    first, second = await twice(body, cache={})
    assert first == second
    assert first.index("user 3") - first.index("user 0") == 3


@pytest.mark.parametrize("concurrency", [1, 2, 32])
async def test_items_of_a_map_that_have_a_key_in_common_have_the_result_in_common(concurrency: int) -> None:
    fn = Counted("a", ValueError("b"), "c")

    async def body(ctx: Context[Any]) -> Any:
        found = await ctx.map(
            "m", fn, ["x", "y", "x", "x", "z", "y"], key=lambda item: item, concurrency=concurrency, on_error="collect"
        )
        return [repr(each) for each in found]

    first, second = await twice(body, cache={})
    assert first == second
    a, b, c = "Ok(value='a')", "Err(error=ValueError('b'), cause=None)", "Ok(value='c')"
    assert first == [a, b, a, a, c, b]
    assert fn.calls == 3


class FirstHangs(Gated):
    """A step's function whose first call never ends by itself."""

    async def __call__(self) -> str:
        if self.calls:
            self.may_end.set()
        return await super().__call__()


@pytest.mark.parametrize("ends_by", ["race", "time limit", "cancel"])
@pytest.mark.parametrize("others", [1, 2, 4])
async def test_when_the_first_user_is_cancelled_another_takes_over(ends_by: str, others: int) -> None:
    fn, all_wait = FirstHangs(), asyncio.Event()

    async def body(ctx: Context[Any]) -> Any:
        seen = Seen()

        async def first() -> None:
            if ends_by == "race":
                await ctx.race(ctx.step("s", fn, key="s"), ctx.step("quick", all_wait.wait, key="quick"))
            elif ends_by == "time limit":
                with contextlib.suppress(TimeoutError):
                    async with ctx.timeout("limit", "1m"):
                        await ctx.step("s", fn, key="s")
            else:
                task = asyncio.ensure_future(ctx.step("s", fn, key="s"))
                await ctx.step("quick", all_wait.wait, key="quick")
                task.cancel()
                await asyncio.wait([task])
            seen.log.append(("first", None))

        leading = asyncio.ensure_future(first())
        await ctx.step("the first is under way", Counted(), key="the first is under way")
        users = [asyncio.ensure_future(seen.use(f"user {n}", ctx.step("s", fn, key="s"))) for n in range(others)]
        await ctx.step("all wait", Counted(), key="all wait")
        all_wait.set()
        await asyncio.gather(leading, *users)
        return seen.log

    if ends_by == "time limit":
        first, second = await asyncio.to_thread(simulate, in_virtual_time(body))
    else:
        first, second = await twice(body, cache={})
    assert first == second
    assert first == [("first", None), *[(f"user {n}", "call 2") for n in range(others)]]
    assert (fn.calls, fn.most, fn.cancelled) == (2, 1, 1)


async def in_virtual_time(body: Body) -> list[Any]:
    """What a body gives each time it is replayed, until its run has ended."""
    found: list[Any] = []

    async def noted(ctx: Context[Any]) -> None:
        found.append(await body(ctx))
        await ctx.sleep("end", "1h")

    runtime = Runtime(stores.memory(), [flow(noted, cache={})], clock=LoopClock(), unload_grace="2m", concurrency=0)
    outcome = await runtime.run("flow", id="r")
    while isinstance(outcome, Suspended):
        await asyncio.sleep(3600)
        outcome = await runtime.resume("r")
    await runtime.close()
    assert outcome == Ok(None)
    return found


async def test_waiting_uses_that_are_cancelled_hold_up_nobody() -> None:
    gate = Gated()

    async def body(ctx: Context[Any]) -> Any:
        seen = Seen()
        tasks = [asyncio.ensure_future(seen.use(f"user {n}", ctx.step("s", gate, key="s"))) for n in range(5)]
        await ctx.step("quick", Counted(), key="quick")
        for n in (1, 3):
            tasks[n].cancel()
        await ctx.step("quick 2", Counted(), key="quick 2")
        tasks[0].cancel()
        gate.may_end.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        return [*seen.log, await ctx.step("s", gate, key="s"), await ctx.step("last", Counted(), key="last")]

    first, second = await twice(body, cache={})
    assert first == second
    assert first == [("user 2", "call 2"), ("user 4", "call 2"), "call 2", "first"]


async def test_a_run_leaves_memory_while_a_second_use_waits_for_a_first_that_pauses(store: Store) -> None:
    fn = Counted(OSError("not yet"), "well")

    async def body(ctx: Context[Any]) -> Any:
        return await asyncio.gather(*(ctx.step("s", fn, retry=HOURLY, key="s") for _ in range(3)))

    async with world(flow(body, cache={}), store=store) as here:
        suspended = await asyncio.wait_for(here.runtime.run("flow", id="r"), PATIENCE)
        assert isinstance(suspended, Suspended)
        assert await here.later("1h") == {"r": Ok(["well"] * 3)}
    assert fn.calls == 2


async def test_a_second_use_that_comes_late_does_not_keep_the_run_in_memory(store: Store) -> None:
    fn, arrives = Counted(OSError("not yet"), "well"), asyncio.Event()

    async def body(ctx: Context[Any]) -> Any:
        async def late() -> Any:
            await arrives.wait()  # something of the body's own
            return await ctx.step("s", fn, retry=HOURLY, key="s")

        return await ctx.race(late(), late(), ctx.step("s", fn, retry=HOURLY, key="s"))

    async with world(flow(body, cache={}), store=store, unload_grace="1m") as here:
        driving = asyncio.ensure_future(here.runtime.run("flow", id="r"))
        await until(lambda: fn.calls == 1)
        for _ in range(50):
            await asyncio.sleep(0)
        arrives.set()
        assert isinstance(await asyncio.wait_for(driving, PATIENCE), Suspended)
        assert await here.later("1h") == {"r": Ok("well")}


async def test_ctx_is_refused_inside_a_steps_function_also_for_a_key_in_use() -> None:
    async def body(ctx: Context[Any]) -> Any:
        async def inside() -> Any:
            return await ctx.step("s", Counted(), key="s")

        return await ctx.step("s", inside, key="s")

    async def later(ctx: Context[Any]) -> Any:
        await ctx.step("s", Counted(), key="s")

        async def inside() -> Any:
            return await ctx.step("s", Counted(), key="s")

        return await ctx.step("t", inside, key="t")

    for each in (body, later):
        outcome = await asyncio.wait_for(flow(each, cache={}).run(), PATIENCE)
        assert isinstance(outcome, Err)
        with pytest.raises(RuntimeError, match="ctx was used inside a step's function"):
            raise outcome.error


async def test_a_second_use_after_the_body_has_ended_is_refused() -> None:
    kept: list[Context[Any]] = []

    async def body(ctx: Context[Any]) -> None:
        kept.append(ctx)
        await ctx.step("s", Counted(), key="s")

    assert await flow(body, cache={}).run() == Ok(None)
    with pytest.raises(Exception, match="its body has returned"):
        await kept[0].step("s", Counted(), key="s")


async def test_a_key_that_failed_ends_the_run_as_failed_because_of_it_whichever_use_raised(store: Store) -> None:
    fn, cache = Counted(ValueError("no"), "well"), dict[str, str]()

    async def body(ctx: Context[Any]) -> Any:
        with contextlib.suppress(ValueError):
            await ctx.step("handled", Counted(ValueError("handled")), key="handled")
        with contextlib.suppress(ValueError):
            await ctx.step("s", fn, key="s")
        return await ctx.step("s", fn, key="s")

    wf = flow(body, cache=cache)
    assert isinstance(await wf.run(id="r", store=store), Err)
    cache.clear()
    assert await wf.run(id="r", store=store, retry_failed=True) == Ok("well")
    assert fn.calls == 2
    assert list(cache) == ["s"]


async def test_keys_of_different_scopes_are_different_keys_in_the_cache_too() -> None:
    fn, cache = Counted(), dict[str, str]()

    async def body(ctx: Context[Any]) -> Any:
        scopes = [ctx, ctx.scope("a"), ctx.scope("a"), ctx.scope("b")]
        return [await scope.step("s", fn, key="s") for scope in scopes]

    assert await flow(body, cache=cache).run() == Ok(["first", "second", "second", "third"])
    assert sorted(cache) == ["/a/s", "/b/s", "s"]


def test_now_is_the_same_on_a_replay_whoever_used_the_key_first() -> None:
    async def body(ctx: Context[Any]) -> Any:
        seen: list[str] = []

        async def user(n: int) -> None:
            await ctx.sleep("nap", n, key=f"nap {n}")
            await ctx.step("s", asyncio.sleep, 1.5, key="s")
            seen.append(f"{n} {ctx.now()}")

        await asyncio.gather(*map(user, range(4)))
        return seen

    first, second = simulate(in_virtual_time(body))
    assert first == second
    assert len(first) == 4


# Whatever the timing, and wherever the process dies.

KEYS: Final = ("k0", "k1", "k2", "bad", "flaky")


class Slow(OwnCache):
    """A cache whose answers take a while, and how long they take is different each time."""

    def __init__(self, kept: dict[str, str], rng: random.Random) -> None:
        super().__init__()
        self.kept = kept
        self._rng = rng

    async def _dawdle(self) -> None:
        await asyncio.sleep(self._rng.choice([0, 0, self._rng.random() * 0.01]))

    async def get(self, key: str) -> str | None:
        await self._dawdle()
        return await super().get(key)

    async def set(self, key: str, value: str, ttl: int | None = None) -> None:
        await self._dawdle()
        await super().set(key, value, ttl)
        await self._dawdle()


class Sight(NamedTuple):
    """Something a branch saw: which records it came from, which branch it was, and what."""

    keys: tuple[str, ...]
    who: str
    what: Any


class Doing:
    """Step functions with random durations, the cache that outlives processes, and what the body saw in the one that lives."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"timing {seed}")
        self.retry = Retry(3, on=OSError, wait_initial=self.rng.choice([0.002, 0.002, 4]), wait_jitter=0)
        self.kept: dict[str, str] = {}
        self.ran: Counter[str] = Counter()
        self.inside: Counter[str] = Counter()
        self.seen: list[Sight] = []
        self.seen_by_each: list[list[Sight]] = []
        self.is_alive: Callable[[], bool] = lambda: True

    async def work(self, label: str) -> str:
        self.ran[label] += 1
        self.inside[label] += 1
        assert self.inside[label] == 1, f"{label} runs twice at once"
        try:
            await asyncio.sleep(self.rng.choice([0, 0.001, self.rng.random() * 0.01]))
        finally:
            self.inside[label] -= 1
        if label == "bad":
            raise ValueError(f"{label} {self.ran[label]}")
        if label == "flaky" and self.ran[label] % 2:
            raise OSError(label)
        return f"<{label} {self.ran[label]}>"

    def saw(self, who: str, what: Any, *keys: str) -> None:
        # What a body does after its process died has no effect.
        if self.is_alive():
            self.seen.append(Sight(keys, who, what))

    def flow(self, program: Program) -> Workflow[[], None]:
        async def body(ctx: Context[Any]) -> None:
            self.seen = []
            await program.play(self, ctx)
            # A step's result may go to the store together with the end of the run. This one makes the others go before.
            await ctx.step("seal", asyncio.sleep, 0, cache=False)
            self.seen_by_each.append(self.seen)

        async def listen(_: Event) -> None:
            await asyncio.sleep(self.rng.choice([0, 0, self.rng.random() * 0.01]))

        options: dict[str, Any] = {"on_event": listen} if self.rng.random() < 0.3 else {}
        return Workflow("flow", body, cache=Slow(self.kept, self.rng), **options)


class Program:
    """A random body: branches that use a few cached keys again and again, beside plain steps, races, time limits and maps.

    Keys of plain steps say how much was seen before, so that a replay that sees another order asks for other keys.
    """

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"program {seed}")
        self.branches = [self._ops(2, 4) for _ in range(self._rng.randint(2, 4))]

    def _ops(self, depth: int, most: int) -> list[tuple[Any, ...]]:
        return [self._op(depth) for _ in range(self._rng.randint(1, most))]

    def _op(self, depth: int) -> tuple[Any, ...]:
        rng = self._rng
        kinds = ["cached"] * 6 + ["plain"] * 3 + ["sleep", "sleep", "cancel"]
        kind = rng.choice([*kinds, "race", "race", "limit", "gather", "map", "map"] if depth else kinds)
        match kind:
            case "cached":
                return kind, rng.choice(KEYS)
            case "sleep":
                return kind, rng.choice([0.001, 0.004, 0.004, 3])
            case "cancel":
                return kind, rng.randrange(len(KEYS))
            case "race" | "gather":
                return kind, [self._ops(depth - 1, 2) for _ in range(rng.randint(2, 3))]
            case "limit":
                return kind, rng.choice([0.002, 0.006, 0.02]), self._ops(depth - 1, 3)
            case "map":
                return kind, rng.choices(KEYS, k=rng.randint(2, 5)), rng.choice([1, 3])
        return (kind,)

    async def play(self, doing: Doing, ctx: Context[Any]) -> None:
        tasks: list[asyncio.Future[str]] = []
        stage = Stage(doing, ctx, tasks)
        tasks += [asyncio.ensure_future(stage.branch(f"b{n}", ops)) for n, ops in enumerate(self.branches)]
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        doing.saw("body", [repr(end) for end in ends])


class Stage:
    """One playing of a program."""

    def __init__(self, doing: Doing, ctx: Context[Any], tasks: list[asyncio.Future[str]]) -> None:
        self._doing = doing
        self._ctx = ctx
        self._tasks = tasks

    async def branch(self, who: str, ops: list[tuple[Any, ...]]) -> str:
        for number, (kind, *rest) in enumerate(ops):
            act: Callable[..., Awaitable[None]] = getattr(self, f"_{kind}")
            await act(f"{who}.{number}", *rest)
        return who

    def _new_key(self, who: str) -> str:
        return f"{who}@{len(self._doing.seen)}"

    async def _cached(self, who: str, key: str) -> None:
        try:
            value = await self._ctx.step("work", self._doing.work, key, key=key, retry=self._doing.retry)
        except (ValueError, OSError) as error:
            value = repr(error)
        self._doing.saw(who, value, key)

    async def _plain(self, who: str) -> None:
        key = self._new_key(who)
        self._doing.saw(who, await self._ctx.step("work", self._doing.work, key, key=key, cache=False), key)

    async def _sleep(self, who: str, seconds: float) -> None:
        key = self._new_key(who)
        await self._ctx.sleep("nap", seconds, key=key)
        self._doing.saw(who, None, key)

    async def _cancel(self, who: str, number: int) -> None:
        task = self._tasks[number % len(self._tasks)]
        self._doing.saw(who, task.done())
        if not who.startswith(f"b{number % len(self._tasks)}."):
            task.cancel()

    async def _race(self, who: str, racers: list[list[tuple[Any, ...]]]) -> None:
        branches = (self.branch(f"{who}r{n}", ops) for n, ops in enumerate(racers))
        self._doing.saw(who, await self._ctx.race(*branches, key=self._new_key(who)))

    async def _gather(self, who: str, branches: list[list[tuple[Any, ...]]]) -> None:
        self._doing.saw(who, await asyncio.gather(*(self.branch(f"{who}g{n}", ops) for n, ops in enumerate(branches))))

    async def _limit(self, who: str, seconds: float, ops: list[tuple[Any, ...]]) -> None:
        key = self._new_key(who)
        try:
            async with self._ctx.timeout("limit", seconds, key=key):
                await self.branch(f"{who}l", ops)
        except TimeoutError:
            self._doing.saw(who, "late", key)
        else:
            self._doing.saw(who, "in time")

    async def _map(self, who: str, keys: list[str], concurrency: int) -> None:
        found = await self._ctx.map(
            "work",
            self._doing.work,
            keys,
            key=lambda key: key,
            concurrency=concurrency,
            on_error="collect",
            retry=self._doing.retry,
        )
        self._doing.saw(who, [repr(each) for each in found], *keys)


async def drive_to_the_end(store: Any, definition: Workflow[[], None]) -> bool:
    """Whether it came to the end, through suspensions; False when the process died on the way."""
    runtime = Runtime(store, [definition], clock=LoopClock(), unload_grace=0.5, concurrency=0)
    try:
        outcome = await runtime.run(definition, id="run")
        while isinstance(outcome, Suspended):
            await asyncio.sleep(0.5)
            outcome = await runtime.resume("run")
    except PersistenceError:
        return False
    finally:
        await runtime.close()
    assert outcome == Ok(None)
    return True


async def writes_of(seed: int) -> int:
    """How many writes it takes when nothing happens to it."""
    store = MortalStore(SlowStore(stores.memory(), random.Random(seed)), 10**9, after_commit=False)
    assert await drive_to_the_end(store, Doing(seed).flow(Program(seed)))
    return 10**9 - store.writes_left


async def die_and_go_on(seed: int, dies_at: int, *, after_commit: bool) -> Doing:
    """The process dies at one write and another goes on. Checks that what came from records is seen again, and nothing else."""
    doing, program, store = Doing(seed), Program(seed), stores.memory()
    mortal = MortalStore(SlowStore(store, random.Random(seed)), dies_at, after_commit=after_commit)
    doing.is_alive = lambda: mortal.writes_left >= 0
    assert not await drive_to_the_end(mortal, doing.flow(program)), "it died before the end"
    await asyncio.sleep(31)  # the lease expires
    doing.is_alive = lambda: True
    recorded = {entry.key for entry in await store.journal("run") if entry.phase == "close"}
    before = seen_for_certain(doing.seen, recorded)
    if doing.rng.random() < 0.3:
        doing.kept.clear()  # a cache may forget
    ran, kept = doing.ran.copy(), set(doing.kept)
    row = await store.get("run")
    if row is not None and row.ended:
        return doing
    assert await drive_to_the_end(store, doing.flow(program))
    assert doing.seen[: len(before)] == before, "the body saw something else, or in another order"
    again = [key for key in recorded | kept if doing.ran[key] > ran[key]]
    assert not again, f"recorded or cached steps ran again: {again}"
    return doing


def seen_for_certain(seen: list[Sight], recorded: set[str]) -> list[Sight]:
    """What was seen before the first thing that was lost with the process."""
    lost = (n for n, sight in enumerate(seen) if not recorded.issuperset(sight.keys))
    return seen[: next(lost, len(seen))]


def test_a_crash_at_any_write_changes_nothing_that_was_recorded() -> None:
    for seed in range(times(200)):
        every = range(1, simulate(writes_of(seed)))
        writes = every if IS_FULL or seed % 10 == 0 else random.Random(seed).choices(every, k=3)
        for dies_at in writes:
            for after_commit in (False, True):
                simulate(die_and_go_on(seed, dies_at, after_commit=after_commit))


def test_a_whole_replay_sees_the_same() -> None:
    for seed in range(times(600)):
        doing = simulate(die_and_go_on(seed, simulate(writes_of(seed)) - 1, after_commit=False))
        first, second = doing.seen_by_each
        assert first == second

"""The runtime for tests: time that passes by itself or by hand, stubs, scripted signals, and assertions on history."""

from __future__ import annotations

import asyncio
import random
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from perdure import Approved, Context, Err, Ok, Rejected, Retry, Suspended, WaitingFor, current_step, step, testing, workflow
from perdure.errors import DeadlineExceeded, StepTimeout
from tests.patience import PATIENCE


async def welcome(name: str) -> str:
    return f"welcome {name}"


def remind(name: str) -> str:
    return f"{name}, are you there?"


@workflow
async def signup(ctx: Context, name: str) -> list[str]:
    first = await ctx.step(welcome, name)
    await ctx.sleep("trial", "14d")
    return [first, await ctx.step(remind, name)]


@workflow
async def review(ctx: Context, text: str) -> Any:
    await ctx.step("submit", welcome, text)
    return await ctx.wait_for_signal("decision", timeout="2d", default="nobody answered")


@workflow
async def untimed(ctx: Context) -> Any:
    return await ctx.wait_for_signal("word")


@pytest.mark.parametrize("place", ["memory", "sqlite"])
async def test_two_weeks_pass_by_themselves(place: str, tmp_path: Path) -> None:
    store = None if place == "memory" else f"sqlite:///{tmp_path}/runs.db"
    began = time.monotonic()
    async with testing.runtime(signup, store=store) as rt:
        before = rt.now()
        assert await rt.run(signup, "ada") == Ok(["welcome ada", "ada, are you there?"])
        assert rt.now() - before == timedelta(days=14)
        run = await rt.start(signup, "grace")
        assert await run == ["welcome grace", "grace, are you there?"]
        assert rt.now() - before == timedelta(days=28)
    assert time.monotonic() - began < PATIENCE


async def test_many_runs_see_one_time_in_its_order() -> None:
    seen: list[str] = []

    async def note(word: str) -> None:
        seen.append(word)

    @workflow
    async def timed(ctx: Context, days: int) -> None:
        await ctx.sleep("wait", timedelta(days=days))
        await ctx.step(note, f"day {days}")

    async with testing.runtime(timed) as rt:
        runs = [await rt.start(timed, days) for days in (30, 3, 14, 1)]
        await asyncio.gather(*runs)
    assert seen == ["day 1", "day 3", "day 14", "day 30"]


async def test_time_passes_by_hand() -> None:
    async with testing.runtime(signup, auto_skip=False) as rt:
        run = await rt.start(signup, "ada")
        assert isinstance(await rt.run(signup, "grace"), Suspended)
        await rt.skip("13d")
        assert await run.status() == "suspended"
        await rt.skip("1d")
        assert await run.status() == "completed"
        at = rt.now() + timedelta(hours=5)
        await rt.skip_to(at)
        assert rt.now() == at


async def test_time_stands_still_while_no_run_is_awaited() -> None:
    async with testing.runtime(review) as rt:
        run = await rt.start(review, "text")
        before = rt.now()
        await rt.settle()
        await run.signal("decision", "yes")
        await rt.settle()
        assert rt.now() == before
        assert await run == "yes"


async def test_a_time_out_of_a_wait_is_reached() -> None:
    async with testing.runtime(review) as rt:
        assert await rt.run(review, "text") == Ok("nobody answered")


async def test_a_run_that_waits_for_what_time_does_not_bring_is_suspended() -> None:
    async with testing.runtime(untimed) as rt:
        outcome = await rt.run(untimed, id="r")
        assert outcome == Suspended("r", None, (WaitingFor("signal", "word"),))
        run = await rt.get("r")
        assert run is not None
        waiting = asyncio.ensure_future(run)
        await rt.signal("r", "word", "now")
        assert await waiting == "now"


async def test_back_off_follows_virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "uniform", lambda least, _most: least)
    attempts: list[int] = []

    async def flaky() -> str:
        attempts.append(current_step().attempt)
        if len(attempts) < 3:
            raise OSError("not yet")
        return "third time"

    @workflow
    async def retried(ctx: Context) -> str:
        return await ctx.step(flaky, retry=Retry(attempts=3, wait_initial="1h", wait_max="1d", wait_jitter=0))

    async with testing.runtime(retried) as rt:
        before = rt.now()
        assert await rt.run(retried, id="r") == Ok("third time")
        assert rt.now() - before == timedelta(hours=3)
        await rt.assert_history("r", ["flaky, attempt 3"])


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "plain"])
async def test_a_step_that_hangs_reaches_its_time_limit(is_async: bool) -> None:
    ended = threading.Event()

    async def hang() -> None:
        await asyncio.Event().wait()

    def hang_in_thread() -> None:
        ended.wait(30)

    fn: Callable[[], Any] = hang if is_async else hang_in_thread

    @workflow
    async def hanging(ctx: Context) -> None:
        await ctx.step("hang", fn, timeout="1h", abandon=True)

    try:
        async with testing.runtime(hanging, hang_after="50ms") as rt:
            before = rt.now()
            outcome = await rt.run(hanging)
            assert isinstance(outcome, Err)
            assert isinstance(outcome.error, StepTimeout)
            assert rt.now() - before == timedelta(hours=1)
    finally:
        ended.set()


async def test_a_step_that_works_is_not_timed_out() -> None:
    async def slow() -> str:
        await asyncio.sleep(0.05)
        return "done"

    @workflow
    async def working(ctx: Context) -> str:
        return await ctx.step(slow, timeout="10ms")

    async with testing.runtime(working) as rt:
        assert await rt.run(working) == Ok("done")


async def test_a_deadline_is_reached() -> None:
    async with testing.runtime(signup) as rt:
        outcome = await rt.run(signup, "ada", deadline="3d")
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, DeadlineExceeded)


async def test_schedules_follow_virtual_time() -> None:
    @workflow
    async def report(ctx: Context) -> str:
        return f"{ctx.scheduled_at:%H:%M}"

    async with testing.runtime(report) as rt:
        await rt.schedule(report, every="1h", id="hourly")
        await rt.skip("1d")
        assert len(await rt.list(workflow="report", limit=1000)) == 24


async def test_a_run_beside_a_schedule_ends() -> None:
    @workflow
    async def report(ctx: Context) -> None:
        pass

    async with testing.runtime(report, signup, untimed) as rt:
        await rt.schedule(report, every="1d", id="daily")
        assert await rt.run(signup, "ada") == Ok(["welcome ada", "ada, are you there?"])
        assert len(await rt.list(workflow="report", limit=1000)) in (13, 14)
        assert isinstance(await rt.run(untimed), Suspended)


async def test_a_run_that_does_not_fit_its_code_fails_the_test_that_awaits_it() -> None:
    """It would be tried again after a pause, and in virtual time that would go on for ever."""
    attempts: list[str] = []

    @workflow
    async def changed(ctx: Context) -> None:
        attempts.append("new" if len(attempts) == 1 else "old")
        await ctx.step(attempts[-1], welcome, "ada")
        await ctx.sleep("nap", "1h")

    async with testing.runtime(changed, unload_grace=0) as rt:
        run = await rt.start(changed, id="r")
        with pytest.raises(testing.RunCannotGoOn, match=r"(?s)'r'.*'new'"):
            await run
        assert attempts == ["old", "new"]


async def test_unload_grace_follows_virtual_time() -> None:
    drives: list[str] = []

    @workflow
    async def short(ctx: Context) -> None:
        drives.append(ctx.run_id)
        await ctx.sleep("short", "5m")

    for grace, expected in (("10m", 1), ("1m", 2)):
        drives.clear()
        async with testing.runtime(short, unload_grace=grace) as rt:
            assert await rt.run(short) == Ok(None)
        assert len(drives) == expected


class CardDeclined(Exception):
    pass


async def charge(name: str) -> str:
    raise AssertionError(f"{name} was charged")


class Mailer:
    def __init__(self) -> None:
        self.sent: list[str] = []

    async def send(self, name: str) -> None:
        self.sent.append(name)


@workflow
async def order(ctx: Context, name: str) -> str:
    payment = await ctx.step(charge, name, retry=Retry(attempts=3, wait_initial="1h", wait_max="1h", wait_jitter=0))
    await ctx.step("mail", ctx.deps.send, name, key="mail:1")
    return payment


async def test_a_stub_returns_raises_and_calls() -> None:
    mailer = Mailer()
    async with testing.runtime(order, deps=mailer) as rt:
        declined = rt.stub(charge, raises=CardDeclined, times=1)
        late = rt.stub(charge, calls=lambda name: f"payment of {name}")
        assert await rt.run(order, "ada", id="r") == Ok("payment of ada")
        assert declined.calls == late.calls == [("ada",)]
        await rt.assert_history("r", ["charge, attempt 2", "mail:1"])
    assert mailer.sent == ["ada"]


async def test_a_stub_stands_for_a_key_a_name_or_a_method() -> None:
    for target in ("mail:1", "mail", Mailer.send):
        mailer = Mailer()
        async with testing.runtime(order, deps=mailer) as rt:
            rt.stub(charge, returns="paid")
            mail = rt.stub(target, returns=None)
            assert await rt.run(order, "ada") == Ok("paid")
            assert len(mail.calls) == 1
        assert mailer.sent == []


async def run_order(prepare: Callable[[testing.VirtualRuntime], object], mailer: Mailer | None = None) -> None:
    async with testing.runtime(order, deps=mailer or Mailer()) as rt:
        rt.stub("charge", returns="paid")
        prepare(rt)
        await rt.run(order, "ada")


async def test_the_method_of_another_object_is_not_stubbed() -> None:
    mailer, other = Mailer(), Mailer()
    with pytest.raises(AssertionError, match=r"the stub of Mailer\.send was never called \(steps that ran: charge, mail:1\)"):
        await run_order(lambda rt: rt.stub(other.send, returns=None), mailer)
    assert mailer.sent == ["ada"]
    await run_order(lambda rt: rt.stub(mailer.send, returns=None), mailer)
    assert mailer.sent == ["ada"]


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda rt: rt.stub("chrage", returns=1), r"the stub of 'chrage' was never called \(steps that ran: charge, mail:1\)"),
        (lambda rt: rt.stub("mail", returns=None, times=2), "the stub of 'mail' was called 1 of 2 times"),
        (lambda rt: rt.signal_when_waiting("decison", "yes"), "no run waited for the scripted signal 'decison'"),
        (lambda rt: rt.reject_when_waiting("pulbish", by="ada"), "no run waited for the scripted approval 'pulbish'"),
    ],
)
async def test_what_is_not_used_is_reported(prepare: Callable[[testing.VirtualRuntime], object], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        await run_order(prepare)


async def test_the_error_of_the_test_itself_is_not_hidden() -> None:
    def fail(rt: testing.VirtualRuntime) -> None:
        raise KeyError

    with pytest.raises(KeyError):
        await run_order(fail)


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        (3, {"returns": 1}, "a step's function, or for its key"),
        (charge, {}, "none of them"),
        (charge, {"returns": 1, "raises": ValueError}, "returns and raises"),
        (charge, {"raises": 3}, "an exception or its class, not 3"),
        (charge, {"calls": 3}, "a function that is called in place"),
        (charge, {"returns": 1, "times": 0}, "at least 1, not 0"),
    ],
)
async def test_a_stub_that_makes_no_sense_is_refused(target: Any, options: Any, message: str) -> None:
    async with testing.runtime(order) as rt:
        with pytest.raises((TypeError, ValueError), match=message):
            rt.stub(target, **options)


async def test_a_stub_keeps_the_options_of_its_step() -> None:
    @step(timeout="1m", at_most_once=True)
    def pay() -> str:
        raise AssertionError("this is the real one")

    @workflow
    async def paying(ctx: Context) -> str:
        return await ctx.step(pay)

    async def hang() -> None:
        await asyncio.Event().wait()

    async with testing.runtime(paying, hang_after="20ms") as rt:
        rt.stub(pay, calls=hang)
        outcome = await rt.run(paying)
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, StepTimeout)


@pytest.mark.parametrize("pause", ["1ms", "1h"], ids=["in one drive", "over drives"])
async def test_every_attempt_asks_the_stubs(pause: str) -> None:
    real: list[int] = []

    async def pay(cents: int) -> str:
        real.append(current_step().attempt)
        raise OSError("the real one")

    @workflow
    async def paying(ctx: Context) -> str:
        return await ctx.step(pay, 5, retry=Retry(6, wait_initial=pause, wait_max=pause, wait_jitter=0))

    async with testing.runtime(paying) as rt:
        declined = rt.stub(pay, raises=CardDeclined, times=2)
        away = rt.stub("pay", raises=TimeoutError, times=1)
        assert isinstance((await rt.run(paying, id="r")), Err)
        assert (declined.calls, away.calls, real) == ([(5,), (5,)], [(5,)], [4, 5, 6])
        paid = rt.stub(pay, returns="paid")
        await rt.retry("r")
        assert await rt.run(paying, id="r") == Ok("paid")
        assert paid.calls == [(5,)]


def in_a_thread(cents: int) -> str:
    return f"{re.split('[-_][0-9]', threading.current_thread().name)[0]}: {cents}"


@pytest.mark.parametrize("executor", [None, "heavy"])
async def test_after_its_stubs_a_plain_step_runs_where_it_belongs(executor: str | None) -> None:
    @workflow
    async def paying(ctx: Context) -> str:
        retry = Retry(2, wait_initial=0, wait_jitter=0)
        return await ctx.step(in_a_thread, 5, retry=retry, executor=executor, timeout="1h")

    threads = ThreadPoolExecutor(1, thread_name_prefix="heavy")
    try:
        async with testing.runtime(paying, executors={"heavy": threads}) as rt:
            rt.stub(in_a_thread, raises=CardDeclined, times=1)
            outcome = await rt.run(paying)
    finally:
        await asyncio.to_thread(threads.shutdown)
    assert outcome == Ok("perdure-step: 5" if executor is None else "heavy: 5")


async def test_a_stubbed_step_needs_no_executor_here() -> None:
    @workflow
    async def paying(ctx: Context) -> str:
        return await ctx.step(in_a_thread, 5, executor="elsewhere")

    async with testing.runtime(paying) as rt:
        rt.stub(in_a_thread, returns="stubbed")
        assert await rt.run(paying) == Ok("stubbed")


@pytest.mark.parametrize("option", ["none", "compensate", "at_most_once", "timeout"])
async def test_branches_share_the_calls_of_a_stub(option: str) -> None:
    given: dict[str, Any] = {"compensate": remind, "at_most_once": True, "timeout": "1h"}

    @workflow
    async def welcoming(ctx: Context) -> Any:
        options = {option: given[option]} if option in given else {}
        return await ctx.map(welcome, ["ada", "grace", "edsger"], **options)

    async with testing.runtime(welcoming) as rt:
        once = rt.stub(welcome, returns="stubbed", times=1)
        outcome = await rt.run(welcoming)
        assert outcome == Ok(["stubbed", "welcome grace", "welcome edsger"])
        assert once.calls == [("ada",)]


async def test_a_stubbed_step_is_compensated() -> None:
    refunded: list[str] = []

    async def refund(payment: str) -> None:
        refunded.append(payment)

    @workflow
    async def paying(ctx: Context) -> None:
        await ctx.step(charge, "ada", compensate=refund)
        raise CardDeclined

    async with testing.runtime(paying) as rt:
        rt.stub(charge, returns="payment 1")
        assert isinstance(await rt.run(paying), Err)
    assert refunded == ["payment 1"]


async def test_scripted_signals_are_given_when_a_run_waits() -> None:
    @workflow
    async def twice(ctx: Context) -> list[Any]:
        first = await ctx.wait_for_signal("word", key="first")
        await ctx.sleep("between", "1d")
        return [first, await ctx.wait_for_signal("word", key="second", timeout="1h", default="late")]

    async with testing.runtime(twice, review) as rt:
        rt.signal_when_waiting("word", "one")
        rt.signal_when_waiting("word", "two")
        rt.signal_when_waiting("decision", "approved", run_id="b")
        assert await rt.run(twice) == Ok(["one", "two"])
        assert await rt.run(twice) == Ok(["one", "two"])
        assert await rt.run(review, "text", id="a") == Ok("nobody answered")
        assert await rt.run(review, "text", id="b") == Ok("approved")


async def test_scripted_approvals_decide_what_runs_ask() -> None:
    @workflow
    async def publish(ctx: Context, text: str) -> Any:
        match await ctx.approve("publish", text, expires_in="7d"):
            case Approved(payload=payload, by=by):
                return f"{payload}, by {by}"
            case Rejected(reason=reason):
                return f"rejected: {reason}"
        return "expired"

    async with testing.runtime(publish) as rt:
        rt.approve_when_waiting("publish", by="ada", run_id="a")
        rt.approve_when_waiting("publish", by="ada", payload="edited", run_id="b")
        rt.reject_when_waiting("publish", by="eve", reason="no", run_id="c")
        assert await rt.run(publish, "text", id="a") == Ok("text, by ada")
        assert await rt.run(publish, "text", id="b") == Ok("edited, by ada")
        assert await rt.run(publish, "text", id="c") == Ok("rejected: no")
        before = rt.now()
        assert await rt.run(publish, "text", id="d") == Ok("expired")
        assert rt.now() - before == timedelta(days=7)
        for run_id, end in (("a", "approved"), ("c", "rejected"), ("d", "expired")):
            await rt.assert_history(run_id, [f"approval publish {end}"])


async def test_a_history_says_what_happened() -> None:
    async def fail() -> None:
        raise CardDeclined("no money")

    @workflow
    async def everything(ctx: Context) -> None:
        await ctx.step(welcome, "ada")
        await ctx.sleep("settle", "1h30m")
        await ctx.wait_for_signal("review", timeout="1d", default=None)
        with pytest.raises(CardDeclined):
            await ctx.step(fail)
        await ctx.wait_for_signal("never")

    async with testing.runtime(everything) as rt:
        await rt.run(everything, id="r")
        expected = [
            "welcome",
            "sleep settle 1h30m",
            "signal review timed out",
            "fail failed: CardDeclined",
            "waits for signal never",
        ]
        await rt.assert_history("r", expected)
        items = await rt.history("r")
        assert [str(item) for item in items] == expected
        assert (items[0].value, items[0].ok, items[-1].is_over) == ("welcome ada", True, False)
        with pytest.raises(AssertionError) as failure:
            await rt.assert_history("r", ["welcome", "charge", *expected[1:]])
    assert str(failure.value).splitlines() == [
        "run 'r' has another history:",
        "--- expected",
        "+++ recorded",
        "@@ -1,6 +1,5 @@",
        " welcome",
        "-charge",
        " sleep settle 1h30m",
        " signal review timed out",
        " fail failed: CardDeclined",
        " waits for signal never",
    ]


async def test_a_clock_of_ones_own_is_refused() -> None:
    with pytest.raises(TypeError, match="a clock of its own"):
        testing.runtime(signup, clock=testing.ManualClock())

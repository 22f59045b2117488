"""`wf.run(id=, store=)` over what only keeps whole states: nothing recorded is done again, whatever is lost in between."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass
from typing import Any

import pytest

from perdure import Context, Err, Ok, Retry, Runtime, Suspended, workflow
from perdure.errors import PersistenceError, RunConflict, SnapshotFormatError
from perdure.events import Event, StepCompleteEvent
from perdure.result import Outcome
from perdure.state import MemoryKeyValueStore, Snapshot, StatePersistence


class SnapshotStore:
    """A user's own five-method store. Two on one dict are two processes, one after the other."""

    def __init__(self, texts: dict[str, str]) -> None:
        self.texts = texts
        self.saves = 0
        # After so many saves the process is gone: nothing is saved any more.
        self.dies_after: int | None = None

    async def save(self, id: str, snapshot: Snapshot) -> None:  # noqa: A002 - the name people know
        self.saves += 1
        if self.dies_after is not None and self.saves > self.dies_after:
            raise OSError("no space left on device")
        await asyncio.sleep(0)
        self.texts[id] = json.dumps(snapshot.to_dict())

    async def load(self, id: str) -> dict[str, Any] | None:  # noqa: A002 - as above
        return json.loads(self.texts[id]) if id in self.texts else None

    async def delete(self, id: str) -> None:  # noqa: A002 - as above
        self.texts.pop(id, None)

    async def list(self, prefix: str = "", limit: int = 100) -> list[str]:
        return [id_ for id_ in sorted(self.texts) if id_.startswith(prefix)][:limit]

    async def close(self) -> None: ...


calls: list[str] = []


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    calls.clear()


async def charge(cents: int) -> int:
    calls.append(f"charge {cents}")
    return cents


async def mail(to: str) -> str:
    calls.append(f"mail {to}")
    return f"to {to}"


@workflow
async def checkout(ctx: Context, cents: int) -> list[Any]:
    paid = await ctx.step(charge, cents)
    first, second = await asyncio.gather(ctx.step(mail, "ada", key="mail:ada"), ctx.step(mail, "bob", key="mail:bob"))
    answer = await ctx.wait_for_signal("approve")
    await ctx.sleep("settle", 0)
    return [paid, first, second, answer, str(ctx.uuid4()), ctx.now().isoformat()]


async def _go_on(texts: dict[str, str]) -> Outcome[list[Any]]:
    """One process: it runs what there is to run, and answers once there is a question."""
    store = SnapshotStore(texts)
    outcome = await checkout.run(5, id="c", store=store)
    if isinstance(outcome, Suspended):
        run = await checkout.start(5, id="c", store=store)
        await run.signal("approve", "yes", dedupe="once")
        outcome = Ok(await run)
    return outcome


async def test_a_run_goes_on_over_a_users_own_snapshot_store() -> None:
    texts: dict[str, str] = {}
    assert isinstance(await checkout.run(5, id="c", store=SnapshotStore(texts)), Suspended)
    assert isinstance(await checkout.run(5, id="c", store=SnapshotStore(texts)), Suspended)
    first = (await _go_on(texts)).unwrap()
    assert first[:4] == [5, "to ada", "to bob", "yes"]
    assert sorted(calls) == ["charge 5", "mail ada", "mail bob"]
    assert await checkout.run(5, id="c", store=SnapshotStore(texts)) == Ok(first)
    assert len(calls) == 3


@pytest.mark.parametrize("dies_after", range(9))
async def test_a_process_that_can_no_longer_save_loses_nothing_that_was_saved(dies_after: int) -> None:
    texts: dict[str, str] = {}
    dying = SnapshotStore(texts)
    dying.dies_after = dies_after
    with contextlib.suppress(PersistenceError):
        await checkout.run(5, id="c", store=dying)
    saved = json.loads(texts["c"])["steps"] if "c" in texts else {}
    calls.clear()
    assert (await _go_on(texts)).unwrap()[:4] == [5, "to ada", "to bob", "yes"]
    done_again = {"charge": "charge 5", "mail:ada": "mail ada", "mail:bob": "mail bob"}
    assert sorted(calls) == sorted(call for key, call in done_again.items() if key not in saved)


async def test_a_state_that_was_deleted_is_a_fresh_start() -> None:
    store = SnapshotStore({})
    assert isinstance(await checkout.run(5, id="c", store=store), Suspended)
    await store.delete("c")
    assert isinstance(await checkout.run(5, id="c", store=store), Suspended)
    assert calls.count("charge 5") == 2


async def test_a_state_that_was_replaced_counts() -> None:
    store, other = SnapshotStore({}), SnapshotStore({})
    assert isinstance(await checkout.run(5, id="c", store=store), Suspended)
    await _go_on(other.texts)
    store.texts["c"] = other.texts["c"]
    assert isinstance(await checkout.run(5, id="c", store=store), Ok)


async def test_another_input_is_a_conflict() -> None:
    store = SnapshotStore({})
    await checkout.run(5, id="c", store=store)
    with pytest.raises(RunConflict):
        await checkout.run(6, id="c", store=store)


async def test_two_calls_at_once_are_one_run() -> None:
    store = SnapshotStore({})
    both = await asyncio.gather(checkout.run(5, id="c", store=store), checkout.run(5, id="c", store=store))
    assert [type(outcome) for outcome in both] == [Suspended, Suspended]
    assert calls.count("charge 5") == 1


async def test_retries_and_failures_are_kept() -> None:
    @workflow
    async def failing(ctx: Context) -> int:
        await ctx.step(charge, 1)
        return await ctx.step("fail", fail, retry=Retry(2, wait_initial=0, wait_jitter=0))

    tries: list[int] = []

    async def fail() -> int:
        tries.append(1)
        if len(tries) < 4:
            raise ValueError("no")
        return 7

    texts: dict[str, str] = {}
    for _ in range(2):
        outcome = await failing.run(id="f", store=SnapshotStore(texts))
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, ValueError)
    assert (len(tries), calls) == (2, ["charge 1"])
    assert await failing.run(id="f", store=SnapshotStore(texts), retry_failed=True) == Ok(7)
    assert (len(tries), calls) == (4, ["charge 1"])


async def test_state_persistence_keeps_a_run_that_waits() -> None:
    kv = MemoryKeyValueStore()
    assert isinstance(await checkout.run(5, id="c", store=StatePersistence(kv)), Suspended)
    run = await checkout.start(5, id="c", store=StatePersistence(kv))
    await run.signal("approve", "yes")
    value = await run
    assert value[3] == "yes"
    assert await checkout.run(5, id="c", store=StatePersistence(kv)) == Ok(value)
    assert len(calls) == 3
    state = await StatePersistence(kv).load("c")
    assert state is not None
    assert list(state.steps) == ["charge", "mail:ada", "mail:bob", "approve", "settle"]


@pytest.mark.parametrize("text", ["", "{", '{"version": 2, "entries": {}}', '{"version": 1, "entries": {"charge": {}}}', "null"])
async def test_a_corrupt_state_is_an_error_that_names_the_key_and_never_a_fresh_start(text: str) -> None:
    kv = MemoryKeyValueStore()
    await kv.set("workflow:state:c", text)
    with pytest.raises(SnapshotFormatError, match="'workflow:state:c'"):
        await checkout.run(5, id="c", store=StatePersistence(kv))
    assert calls == []
    assert await kv.get("workflow:state:c") == text


async def test_a_listener_is_told_of_a_step_when_its_state_is_kept() -> None:
    store = SnapshotStore({})
    missing: list[str] = []

    def listen(event: Event) -> None:
        if isinstance(event, StepCompleteEvent) and event.key not in json.loads(store.texts["c"])["steps"]:
            missing.append(event.key)

    await checkout.run(5, id="c", store=store, on_event=listen)
    assert missing == []


async def test_a_runtime_needs_a_store() -> None:
    with pytest.raises(TypeError, match="a Runtime needs a store"):
        Runtime(store=StatePersistence(MemoryKeyValueStore()))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="store= takes a store"):
        await checkout.run(5, id="c", store=StatePersistence)  # type: ignore[call-overload]


async def test_a_keeper_may_be_plain_and_of_any_class() -> None:
    @dataclass
    class Plain:
        kept: dict[str, Any]
        is_broken: bool = False

        def save(self, run_id: str, snapshot: Snapshot) -> None:
            if self.is_broken:
                raise OSError("no space left on device")
            self.kept[run_id] = snapshot

        def load(self, run_id: str) -> Snapshot | None:
            return self.kept.get(run_id)

        def delete(self, run_id: str) -> None:
            self.kept.pop(run_id, None)

    one, other = Plain({}), Plain({})
    assert one == other
    assert isinstance(await checkout.run(5, id="c", store=one), Suspended)
    assert other.kept == {}
    assert isinstance(await checkout.run(5, id="c", store=other), Suspended)
    with pytest.raises(PersistenceError, match="no space left"):
        await checkout.run(5, id="d", store=Plain({}, is_broken=True))


@workflow
async def counting(ctx: Context, number: int) -> list[Any]:
    await ctx.step("work", calls.append, f"work {number}")
    await ctx.sleep("pause", "1h") if number == 2 else None
    if number < 3:
        await ctx.continue_as(number + 1)
    return [number, ctx.idempotency_key("work")]


async def test_a_run_that_starts_over_is_kept_with_its_generation() -> None:
    texts: dict[str, str] = {}
    for _ in range(2):
        assert isinstance(await counting.run(0, id="c", store=SnapshotStore(texts)), Suspended)
    kept = json.loads(texts["c"])
    assert (list(kept["steps"]), kept["metadata"]["input"]) == (["work"], [[2], {}])
    assert kept["metadata"]["perdure"]["generation"] == 2
    assert calls == ["work 0", "work 1", "work 2"]
    with pytest.raises(RunConflict):
        await counting.run(2, id="c", store=SnapshotStore(texts))

"""States in every kind of key-value store, with one line: `StatePersistence.open(dsn)`."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from perdure import Context, Ok, Suspended, workflow
from perdure.errors import SnapshotFormatError, StoreClosed
from perdure.kv.protocol import maybe_await
from perdure.state import MemoryKeyValueStore, ResumeState, Snapshot, StatePersistence, StepResult, dump_state
from tests.kv.places import MemoryPlace, Place
from tests.snapshots.documents import COMPLETED

STATE = ResumeState({"a": StepResult(ok=True, value="NUL \0 and \U0001f600")}, {"x": 1})
IDS = ["Order-1", "order-1", "a*b", "a%", "../x", "\u00f3", "$ne", "x" * 1024, "\U0010ffff"]


async def opened(place: Place, prefix: str = "workflow:state:") -> StatePersistence:
    return await asyncio.to_thread(StatePersistence.open, place.dsn, prefix)


async def test_states_are_saved_loaded_listed_and_deleted(place: Place) -> None:
    async with await opened(place) as states:
        assert (await states.load("wf-1"), await states.list()) == (None, [])
        await states.save("wf-2", Snapshot.from_dict(COMPLETED))
        for id_ in IDS:
            await states.save(id_, STATE, {"id": id_})
        assert await states.list() == sorted([*IDS, "wf-2"])
        assert [await states.load(id_) for id_ in IDS] == [ResumeState(STATE.steps, {"x": 1, "id": id_}) for id_ in IDS]
        assert [await states.delete(id_) for id_ in [*IDS, IDS[0]]] == [True] * len(IDS) + [False]
        assert await states.list() == ["wf-2"]


async def test_prefixes_are_kept_apart_also_with_a_star_in_them(place: Place) -> None:
    kv = await place.open()
    for prefix in ("a*b:", "axb:", "a:", ""):
        await StatePersistence(kv, prefix).save("1", STATE)
    assert await StatePersistence(kv, "a*b:").list() == ["1"]
    assert await StatePersistence(kv, "axb:").list() == ["1"]


async def test_a_prefix_sees_nothing_of_a_longer_one(place: Place) -> None:
    kv = await place.open()
    all_of_them, seven, seven_eight, unnamed = (StatePersistence(kv, one) for one in ("tenant:", "tenant:7:", "tenant:7:8:", ""))
    secret = ResumeState({"a": StepResult(ok=True, value="secret of tenant 7")})
    await seven.save("8:x", secret)
    await seven.save("plain", secret)
    for other in (all_of_them, seven_eight, unnamed):
        assert await other.list() == []
        for id_ in ("7:8:x", "8:x", "x", "7:plain", "plain", "tenant:7:8:x", "tenant:7:plain", "7:8%3Ax", "8%3Ax"):
            assert (await other.load(id_), await other.load_raw(id_), await other.delete(id_)) == (None, None, False)
            await other.save(id_, STATE)
    assert [await other.list() for other in (all_of_them, unnamed)] == [await seven_eight.list()] * 2
    assert await seven.list() == ["8:x", "plain"]
    assert [await seven.load(id_) for id_ in ("8:x", "plain")] == [secret, secret]


async def test_a_state_that_another_library_saved_under_its_bare_id_is_found_and_deleted(place: Place) -> None:
    kv = await place.open()
    states = StatePersistence(kv)
    text = dump_state(STATE)
    for id_ in ("order:1", "100%", "a:b:c"):
        assert await states.load(id_) is None
        await maybe_await(kv.set(f"workflow:state:{id_}", text))
        assert (await states.load(id_), await states.load_raw(id_)) == (STATE, text)
        changed = ResumeState({"b": StepResult(ok=True, value=2)})
        await states.save(id_, changed)
        assert await states.load(id_) == changed
        assert await states.delete(id_) is True
        assert (await states.load(id_), await states.delete(id_), await maybe_await(kv.keys("*"))) == (None, False, [])


async def test_a_run_goes_on_from_the_state_that_another_library_saved_under_an_id_with_a_colon() -> None:
    charged: list[int] = []

    async def charge(cents: int) -> str:
        charged.append(cents)
        return "paid"

    @workflow
    async def order(ctx: Context, cents: int) -> str:
        return await ctx.step("charge", charge, cents)

    text = '{"version":1,"entries":{"charge":{"result":{"ok":true,"value":"paid there"}}}}'
    for store_it in (True, False):
        kv = MemoryKeyValueStore()
        await kv.set("workflow:state:order:1", text)
        states = StatePersistence(kv)
        if store_it:
            assert await order.run(4250, id="order:1", store=states) == Ok("paid there")
        else:
            assert await order.run(4250, resume_state=await states.load("order:1")) == Ok("paid there")
    assert charged == []


async def test_what_is_damaged_under_a_bare_id_is_an_error_that_names_its_key() -> None:
    kv = MemoryKeyValueStore()
    await kv.set("workflow:state:order:1", "{")
    with pytest.raises(SnapshotFormatError, match="the resume state under key 'workflow:state:order:1' cannot be read"):
        await StatePersistence(kv).load("order:1")


async def test_the_key_of_a_state_is_its_prefix_and_its_id_with_colons_escaped() -> None:
    kv = MemoryKeyValueStore()
    for id_ in ("order-1", "user:1", "100%"):
        await StatePersistence(kv, "tenant:7:").save(id_, STATE)
    assert await kv.keys("*") == ["tenant:7:order-1", "tenant:7:user%3A1", "tenant:7:100%25"]


@pytest.mark.parametrize("kv", [None, {}, "sqlite:///app.db"], ids=["None", "dict", "dsn"])
def test_what_is_no_key_value_store_is_refused_at_once(kv: Any) -> None:
    with pytest.raises(TypeError, match=r"StatePersistence takes a key-value store, .*MemoryKeyValueStore\(\).*open with a DSN"):
        StatePersistence(kv)


@pytest.mark.parametrize("value", ["mine", 7, {"mine": 1}, ["mine"]], ids=repr)
async def test_metadata_that_only_perdure_writes_is_refused_before_anything_is_saved(value: Any) -> None:
    kv = MemoryKeyValueStore()
    states = StatePersistence(kv)
    for state, metadata in ((STATE, {"perdure": value}), (ResumeState(STATE.steps, {"perdure": value}), None)):
        with pytest.raises(SnapshotFormatError, match=r"metadata\.perdure.*give your metadata another name"):
            await states.save("wf-1", state, metadata)
    assert await kv.keys("*") == []


def test_a_prefix_that_could_overlap_another_is_refused() -> None:
    with pytest.raises(ValueError, match="the prefix of states must end in ':', as 'tenant:' does, or be empty"):
        StatePersistence(MemoryKeyValueStore(), "tenant")
    wrong: Any = {"$gt": ""}
    with pytest.raises(TypeError, match="the prefix of states must be a str, not dict"):
        StatePersistence(MemoryKeyValueStore(), wrong)


async def test_what_open_opened_is_closed_and_what_was_brought_along_is_not(place: Place) -> None:
    kv: Any = await place.open()
    brought = StatePersistence(kv)
    async with brought:
        await brought.save("wf-1", STATE)
    await brought.close()
    assert await brought.load("wf-1") is not None

    states = await opened(place)
    await states.save("wf-2", STATE)
    await states.close()
    await states.close()
    with pytest.raises(StoreClosed, match="it was closed; open a new one"):
        await states.load("wf-2")
    is_shared = not isinstance(place, MemoryPlace)
    assert await StatePersistence(kv).list() == (["wf-1", "wf-2"] if is_shared else ["wf-1"])
    await kv.close()


async def test_close_waits_for_what_is_under_way(place: Place) -> None:
    kv = await place.open()
    async with await opened(place) as states:
        saving = [asyncio.ensure_future(states.save(f"wf-{n}", STATE)) for n in range(20)]
        for _ in range(3):  # each of them begins
            await asyncio.sleep(0)
    await asyncio.gather(*saving)
    if not isinstance(place, MemoryPlace):
        assert len(await maybe_await(kv.keys("*"))) == 20


async def test_a_run_can_be_driven_on_it_and_goes_on_through_another_handle(place: Place) -> None:
    calls: list[str] = []

    async def greet(name: str) -> str:
        calls.append(name)
        return f"hello {name}"

    @workflow
    async def hello(ctx: Context, name: str) -> str:
        greeting = await ctx.step(greet, name)
        return f"{greeting}, {await ctx.wait_for_signal('answer')}"

    kv = await place.open()
    first = StatePersistence(kv) if isinstance(place, MemoryPlace) else await opened(place)
    assert isinstance(await hello.run("Ada", id="hello-1", store=first), Suspended)
    await first.close()
    second = StatePersistence(kv) if isinstance(place, MemoryPlace) else await opened(place)
    run = await hello.start("Ada", id="hello-1", store=second)
    await run.signal("answer", "goodbye")
    assert await run.outcome() == Ok("hello Ada, goodbye")
    assert calls == ["Ada"]
    await second.close()


async def test_a_key_that_is_too_long_with_its_prefix_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(ValueError, match="must have 1 to 2048 UTF-8 bytes and no NUL \\(it has 2524 bytes\\)"):
        await StatePersistence(MemoryKeyValueStore(), prefix="p" * 1499 + ":").save("x" * 1024, STATE)

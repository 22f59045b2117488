"""What people know from awaitly and @visulima/workflow: a test for each row of the table in docs/coming-from.md."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import asyncpg  # type: ignore[import-untyped]  # it ships no types
import pytest
import redis.asyncio
from pymongo import AsyncMongoClient

from perdure import Context, Err, Ok, Runtime, StoredRun, Suspended, Workflow, open_store, stores, workflow
from perdure.errors import DuplicateStep, PerdureWarning, SnapshotFormatError, SnapshotMismatch
from perdure.events import Event, StepCompleteEvent
from perdure.model.run_filter import RunFilter
from perdure.state import (
    FileCache,
    MemoryCache,
    MemoryKeyValueStore,
    ResumeState,
    ResumeStateCollector,
    Snapshot,
    StatePersistence,
    StepResult,
    assert_valid_snapshot,
    dump_state,
    is_step_complete,
    looks_like_snapshot,
    merge_snapshots,
    parse_state,
    validate_snapshot,
)
from perdure.store import FullStore
from perdure.testing import ManualClock
from tests.backends.opening import store_at
from tests.backends.operators import mysql_lender, postgres_lender
from tests.backends.registry import BACKENDS, Backend
from tests.backends.sql_client.places import CLIENTS
from tests.servers.libsql import shared_server as libsql_server
from tests.snapshots.documents import COMPLETED

pytestmark = pytest.mark.filterwarnings("default::perdure.errors.PerdureWarning")


class Counted:
    """Functions that count how often they are called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def user(self, user_id: str) -> dict[str, str]:
        self.calls.append(f"user:{user_id}")
        return {"id": user_id, "name": "Ada"}

    async def posts(self, user_id: str) -> list[str]:
        self.calls.append(f"posts:{user_id}")
        return ["Notes", "Engines"]

    async def fails(self) -> int:
        self.calls.append("fails")
        raise ValueError(f"no {len(self.calls)}")

    async def returns_err(self) -> Err[str]:
        self.calls.append("returns_err")
        return Err("NOT_FOUND")


def feed(counted: Counted, **options: Any) -> Workflow[[str], int]:
    @workflow(name="feed", **options)
    async def feed(ctx: Context, user_id: str) -> int:
        user = await ctx.step("user", counted.user, user_id, key=f"user:{user_id}")
        posts = await ctx.step("posts", counted.posts, user["id"], key=f"posts:{user_id}")
        return len(posts)

    return feed


async def test_row_create_workflow_run_with_resume_state_and_run_with_state() -> None:
    counted = Counted()
    wf = feed(counted, deps={"base": 1})
    assert await wf("1") == 2
    run = await wf.start("1")
    assert await run == 2
    state = await run.resume_state()
    assert list(state.steps) == ["user:1", "posts:1"]
    counted.calls.clear()
    assert await wf.run("1", resume_state=state) == Ok(2)
    assert await wf.run("1", snapshot=await run.snapshot()) == Ok(2)
    assert counted.calls == []

    async def body(ctx: Context) -> int:
        return int(ctx.deps.base)

    assert await Workflow("plain", body, deps={"base": 7}).run() == Ok(7)


async def test_row_deps_of_the_workflow_the_runtime_and_the_run() -> None:
    async def read(ctx: Context) -> str:
        return str(ctx.deps.base)

    child: Workflow[[], str] = Workflow("child", read, deps={"base": "child"})

    @workflow(deps={"base": "workflow"})
    async def parent(ctx: Context) -> list[str]:
        return [await read(ctx), await child()]

    assert await parent() == ["workflow", "child"]
    assert await parent.run(deps={"base": "run"}) == Ok(["run", "child"])
    store = stores.memory()
    assert await parent.run(id="stored", store=store, deps={"base": "run"}) == Ok(["run", "child"])
    async with Runtime(store, [parent, child], deps={"base": "runtime"}) as runtime:
        assert await (await runtime.start(parent)) == ["runtime", "runtime"]
        with pytest.raises(TypeError, match="do not take deps"):
            await runtime.start(parent, deps={"base": "run"})  # type: ignore[call-overload]


async def test_row_step_with_id_thunk_and_key() -> None:
    calls: list[int] = []

    @workflow
    async def keyed(ctx: Context, n: int) -> list[int]:
        async def double(i: int) -> int:
            calls.append(i)
            return 2 * i

        return [await ctx.step("double", double, i, key=f"double:{i}") for i in range(n)]

    store = stores.memory()
    assert await keyed.run(3, id="k", store=store) == Ok([0, 2, 4])
    assert await keyed.run(3, id="k", store=store) == Ok([0, 2, 4])
    assert calls == [0, 1, 2]
    loaded = await store.load("k")
    assert loaded is not None
    assert list(loaded.steps) == ["double:0", "double:1", "double:2"]

    @workflow
    async def twice(ctx: Context) -> None:
        await ctx.step("a", lambda: 1)
        await ctx.step("a", lambda: 2)

    with pytest.raises(DuplicateStep, match="pass key="):
        await twice()


@pytest.mark.parametrize("kind", ["dict", "memory", "file"])
async def test_row_cache_map_memory_file_survives_runs_keeps_errors_and_delete_retries(kind: str, tmp_path: Path) -> None:
    counted = Counted()
    caches: dict[str, Any] = {
        "dict": {},
        "memory": MemoryCache(max_size=10, ttl="1h"),
        "file": FileCache(tmp_path / "cache"),
    }
    cache = caches[kind]
    wf = feed(counted, cache=cache)
    assert await wf("1") == 2
    assert await wf.run("1") == Ok(2)
    assert counted.calls == ["user:1", "posts:1"]

    @workflow(cache=cache)
    async def failing(ctx: Context) -> int:
        return await ctx.step(counted.fails, key="fails")

    counted.calls.clear()
    for _ in range(3):
        with pytest.raises(ValueError, match="no 1"):
            await failing()
    assert counted.calls == ["fails"]
    deleted = cache.pop("fails") if kind == "dict" else await cache.delete("fails")
    assert deleted
    with pytest.raises(ValueError, match="no 2"):
        await failing()


async def test_row_create_resume_state_collector() -> None:
    counted = Counted()
    collector = ResumeStateCollector()
    await feed(counted, on_event=collector.handle_event)("1")
    state = collector.resume_state()
    assert state.steps == {
        "user:1": StepResult(ok=True, value={"id": "1", "name": "Ada"}),
        "posts:1": StepResult(ok=True, value=["Notes", "Engines"]),
    }
    counted.calls.clear()
    again = ResumeStateCollector()
    assert await feed(counted).run("1", resume_state=state, on_event=again.handle_event) == Ok(2)
    assert counted.calls == []
    assert again.resume_state().steps == state.steps


def test_row_stringify_state_and_parse_state_with_metadata() -> None:
    state = ResumeState({"a": StepResult(ok=True, value=[1, None])})
    text = dump_state(state, workflowId="wf-1", timestamp=5)
    assert json.loads(text) == {
        "version": 1,
        "entries": {"a": {"result": {"ok": True, "value": [1, None]}}},
        "metadata": {"workflowId": "wf-1", "timestamp": 5},
    }
    assert parse_state(text).metadata == {"workflowId": "wf-1", "timestamp": 5}
    assert parse_state(text).steps == state.steps


async def test_row_resume_state_as_value_or_function_evaluated_per_run() -> None:
    counted = Counted()
    wf = feed(counted)
    asked: list[int] = []
    states = iter([None, ResumeState({"user:1": StepResult(ok=True, value={"id": "1"})})])

    async def load() -> ResumeState | None:
        asked.append(1)
        return next(states)

    assert await wf.run("1", resume_state=load) == Ok(2)
    assert counted.calls == ["user:1", "posts:1"]
    assert await wf.run("1", resume_state=load) == Ok(2)
    assert counted.calls[2:] == ["posts:1"]
    assert asked == [1, 1]
    assert await wf.run("1", snapshot=lambda: COMPLETED) == Ok(1)
    assert len(counted.calls) == 3


async def test_row_key_value_store_and_create_state_persistence() -> None:
    clock = ManualClock()
    kv = MemoryKeyValueStore(clock=clock)
    await kv.set("a", "1", ttl=60)
    assert [await kv.get("a"), await kv.exists("a"), await kv.keys("*")] == ["1", True, ["a"]]
    clock.advance("61s")
    assert [await kv.get("a"), await kv.exists("a"), await kv.keys("*"), await kv.delete("a")] == [None, False, [], False]
    persistence = StatePersistence(kv)
    state = ResumeState({"a": StepResult(ok=True, value=1)})
    await persistence.save("wf-1", state, {"note": "x"})
    assert await kv.keys("*") == ["workflow:state:wf-1"]
    loaded = await persistence.load("wf-1")
    assert loaded is not None
    assert (loaded.steps, loaded.metadata) == (state.steps, {"note": "x"})
    assert json.loads(await persistence.load_raw("wf-1") or "")["version"] == 1
    assert await persistence.list() == ["wf-1"]
    assert await persistence.delete("wf-1")
    assert await persistence.load("wf-1") is None


async def test_row_state_persistence_is_a_store() -> None:
    counted = Counted()
    persistence = StatePersistence(MemoryKeyValueStore())
    wf = feed(counted)
    assert await wf.run("1", id="wf-1", store=persistence) == Ok(2)
    assert await wf.run("1", id="wf-1", store=persistence) == Ok(2)
    assert counted.calls == ["user:1", "posts:1"]
    assert await persistence.list() == ["wf-1"]


async def test_row_workflow_snapshot_v1() -> None:
    run = await feed(Counted()).start("1", id="wf-1", store=stores.memory(), metadata={"userId": "7"})
    await run
    snapshot = await run.snapshot()
    tree = snapshot.to_dict()
    assert tree["formatVersion"] == 1
    assert tree["workflowName"] == "feed"
    assert tree["steps"] == {
        "user:1": {"ok": True, "value": {"id": "1", "name": "Ada"}},
        "posts:1": {"ok": True, "value": ["Notes", "Engines"]},
    }
    assert tree["execution"].keys() == {"status", "lastUpdated", "completedAt", "currentStepId"}
    assert (tree["execution"]["status"], tree["execution"]["currentStepId"]) == ("completed", "posts:1")
    assert (tree["metadata"]["workflowId"], tree["metadata"]["userId"]) == ("wf-1", "7")
    assert tree["metadata"]["definitionHash"].startswith("ast1:")
    assert tree["metadata"]["input"] == [["1"], {}]
    assert "warnings" not in tree
    assert json.loads(json.dumps(tree)) == tree
    assert Snapshot.from_dict(tree) == snapshot


async def test_row_get_snapshot_with_include_metadata_limit_and_since() -> None:
    counted = Counted()

    @workflow
    async def mixed(ctx: Context) -> str:
        await ctx.step("a", lambda: 1)
        try:
            await ctx.step("b", counted.fails)
        except ValueError:
            await ctx.step("c", lambda: 3)
        await ctx.step("d", lambda: 4)
        return "done"

    run = await mixed.start()
    await run

    async def keys(**options: Any) -> list[str]:
        return list((await run.snapshot(**options)).steps)

    assert await keys() == ["a", "b", "c", "d"]
    assert await keys(include="completed") == ["a", "c", "d"]
    assert await keys(include="failed") == ["b"]
    assert await keys(limit=2) == ["a", "b"]
    assert await keys(include="completed", limit=2) == ["a", "c"]
    assert await keys(since="b") == ["c", "d"]
    assert await keys(since="a", include="completed", limit=1) == ["c"]
    assert (await run.snapshot(metadata={"note": "x"})).metadata is not None
    assert dict((await run.snapshot(metadata={"note": "x"})).metadata or {})["note"] == "x"
    with pytest.raises(ValueError, match="since='nope'"):
        await run.snapshot(since="nope")
    merged = merge_snapshots(await run.snapshot(limit=2), await run.snapshot(since="b"))
    assert list(merged.steps) == ["a", "b", "c", "d"]
    assert await mixed.run(snapshot=merged) == Ok("done")
    assert len(counted.calls) == 1


async def test_row_subscribe_with_mode_and_coalesce_and_unsubscribe() -> None:
    run = await feed(Counted()).start("1")
    heard: list[str] = []
    queued: list[Event] = []

    async def slow(event: Event) -> None:
        queued.append(event)

    stop = run.subscribe(lambda event: heard.append(event.type))
    with run.subscribe(slow, mode="async", coalesce="latest"):
        assert await run == 2
    assert heard[-1] == "run_complete"
    assert heard.count("step_complete") == 2
    assert queued[-1].type == "run_complete"
    stop()
    with pytest.raises(ValueError, match="needs mode"):
        run.subscribe(slow, coalesce="latest")


async def test_row_snapshot_null_is_fresh_on_unknown_steps_and_on_definition_change() -> None:
    counted = Counted()
    wf = feed(counted)
    assert await wf.run("1", snapshot=None) == Ok(2)
    assert len(counted.calls) == 2
    extra = {**COMPLETED, "steps": {**COMPLETED["steps"], "gone": {"ok": True, "value": 1}}}
    with pytest.warns(PerdureWarning, match="gone"):
        assert await wf.run("1", snapshot=extra) == Ok(1)
    with pytest.raises(SnapshotMismatch, match="gone"):
        await wf.run("1", snapshot=extra, on_unknown_steps="error")
    assert await wf.run("1", snapshot=extra, on_unknown_steps="ignore") == Ok(1)
    changed = {**COMPLETED, "metadata": {"definitionHash": "ast1:another"}}
    with pytest.warns(PerdureWarning, match="code of 'feed' has changed"):
        assert await wf.run("1", snapshot=changed) == Ok(1)
    with pytest.raises(SnapshotMismatch, match="has changed"):
        await wf.run("1", snapshot=changed, on_definition_change="error")
    with pytest.raises(SnapshotMismatch, match="of workflow 'other'"):
        await wf.run("1", snapshot={**COMPLETED, "workflowName": "other"})
    assert len(counted.calls) == 2


def test_row_looks_like_validate_assert_valid_and_merge_snapshots() -> None:
    assert looks_like_snapshot(COMPLETED)
    assert not looks_like_snapshot({"steps": {}})
    validation = validate_snapshot({"formatVersion": 1, "steps": {"a": {"ok": "yes"}}, "execution": {}})
    assert not validation.valid
    assert {error.path for error in validation.errors} == {"$.steps.a.ok", "$.execution.status", "$.execution.lastUpdated"}
    with pytest.raises(SnapshotFormatError, match=r"\$\.steps\.a\.ok"):
        assert_valid_snapshot({**COMPLETED, "steps": {"a": {"ok": 1}}})
    base = assert_valid_snapshot(COMPLETED)
    delta = assert_valid_snapshot({**COMPLETED, "steps": {"user:1": {"ok": True, "value": "new"}}})
    assert merge_snapshots(base, delta).steps["user:1"].value == "new"


async def test_row_is_step_complete_of_state_snapshot_and_event() -> None:
    counted = Counted()
    seen: list[StepCompleteEvent] = []

    def listen(event: Event) -> None:
        if is_step_complete(event):
            seen.append(event)

    @workflow(on_event=listen)
    async def one_each(ctx: Context) -> None:
        await ctx.step("good", lambda: 1)
        await ctx.step("bad", counted.fails)

    run = await one_each.start()
    with pytest.raises(ValueError, match="no 1"):
        await run
    snapshot, state = await run.snapshot(), await run.resume_state()
    for held in (snapshot, state):
        assert is_step_complete(held, "good")
        assert not is_step_complete(held, "bad")
        assert not is_step_complete(held, "never")
    assert not is_step_complete(None, "good")
    assert (snapshot.steps["good"].ok, snapshot.steps["bad"].ok) == (True, False)
    assert [(event.key, event.result.ok) for event in seen] == [("good", True), ("bad", False)]


@pytest.mark.parametrize("dsn", ["memory:", "sqlite"])
async def test_row_snapshot_store_verbs_save_load_delete_list_close(dsn: str, tmp_path: Path) -> None:
    store = open_store("memory:" if dsn == "memory:" else f"sqlite:///{tmp_path}/app.db")
    await store.save("wf-123", COMPLETED)
    loaded = await store.load("wf-123")
    assert loaded is not None
    assert loaded.to_dict() == COMPLETED
    assert [info.id for info in await store.list(RunFilter(prefix="wf-"), limit=10)] == ["wf-123"]
    counted = Counted()
    assert await feed(counted).run("1", id="wf-123", store=store) == Ok(1)
    assert counted.calls == []
    await store.delete("wf-123")
    await store.delete("wf-123")
    assert await store.load("wf-123") is None
    await store.close()


async def test_row_a_users_own_snapshot_store_with_five_methods() -> None:
    class Own:
        def __init__(self) -> None:
            self.texts: dict[str, str] = {}

        async def save(self, run_id: str, snapshot: Snapshot) -> None:
            self.texts[run_id] = json.dumps(snapshot.to_dict())

        async def load(self, run_id: str) -> Snapshot | None:
            return Snapshot.from_dict(json.loads(self.texts[run_id])) if run_id in self.texts else None

        async def delete(self, run_id: str) -> None:
            self.texts.pop(run_id, None)

        async def list(self, prefix: str = "", limit: int = 100) -> list[str]:
            return sorted(run_id for run_id in self.texts if run_id.startswith(prefix))[:limit]

        async def close(self) -> None: ...

    counted, own = Counted(), Own()
    for _ in range(2):
        assert await feed(counted).run("1", id="wf-1", store=own) == Ok(2)
    assert counted.calls == ["user:1", "posts:1"]
    assert await own.list("wf-") == ["wf-1"]


ONE_LINERS: Final = ("sqlite", "postgres", "mysql", "mongo", "redis", "libsql")


@pytest.fixture(params=[BACKENDS[name] for name in ONE_LINERS], ids=str)
def place(request: pytest.FixtureRequest) -> Iterator[str]:
    backend: Backend = request.param
    with backend.place() as dsn:
        yield dsn


async def test_row_one_liners_for_every_database(place: str) -> None:
    counted = Counted()
    store = await asyncio.to_thread(open_store, place)
    await store.setup()
    assert await feed(counted).run("1", id="wf-1", store=store) == Ok(2)
    await store.close()
    assert await feed(counted).run("1", id="wf-1", store=place) == Ok(2)
    assert counted.calls == ["user:1", "posts:1"]
    with pytest.raises(TypeError, match="leases are always on"):
        stores.postgres("postgresql://localhost", lock=True)  # type: ignore[call-arg]


async def test_row_init_is_setup(tmp_path: Path) -> None:
    explicit = open_store(f"sqlite:///{tmp_path}/explicit.db?auto_migrate=false")
    await explicit.setup()
    lazy = open_store(f"sqlite:///{tmp_path}/lazy.db")
    for store in (explicit, lazy):
        assert await feed(Counted()).run("1", id="wf-1", store=store) == Ok(2)
        await store.setup()
        await store.close()


LENDERS: Final[dict[str, Callable[[str], AbstractAsyncContextManager[Callable[[], FullStore]]]]] = {
    "postgres": postgres_lender,
    "mysql": mysql_lender,
}


@pytest.mark.parametrize(("place", "dialect"), [(BACKENDS[name], name) for name in LENDERS], indirect=["place"], ids=str)
async def test_row_sql_store_by_url_or_client(place: str, dialect: Literal["postgres", "mysql"]) -> None:
    async with LENDERS[dialect](place) as on_a_pool, store_at(place) as by_url:
        await _hold_the_same_run(by_url, on_a_pool())
    client = CLIENTS[dialect](place)
    by_client = partial(stores.sql_client, client, dialect, table="flows")
    await _hold_the_same_run(by_client(), by_client())
    await client.close()


@pytest.mark.parametrize("place", [BACKENDS["redis"]], indirect=True, ids=str)
async def test_row_redis_store_by_url_or_client(place: str) -> None:
    url, _, table = place.partition("?table=")
    async with redis.asyncio.Redis.from_url(url, driver_info=None) as client, store_at(place) as by_url:
        await _hold_the_same_run(by_url, stores.redis(client=client, table=table))


async def _hold_the_same_run(*opened: Any) -> None:
    counted = Counted()
    for store in opened:
        assert await feed(counted).run("1", id="order:1", store=store) == Ok(2)
        await store.close()
    assert counted.calls == ["user:1", "posts:1"]


async def test_row_unstorage_store_over_a_key_value_store() -> None:
    counted, kv = Counted(), MemoryKeyValueStore()
    store = stores.key_value(kv)
    assert await feed(counted).run("1", id="order:1", store=store) == Ok(2)
    assert await feed(counted).run("1", id="order:1", store=store) == Ok(2)
    assert counted.calls == ["user:1", "posts:1"]
    assert "shared" not in store.capabilities
    assert await kv.keys("*")
    await store.close()


# As the adapters of awaitly 1 keep it: a snapshot that runs, one that has ended, and a resume state.
AWAITLY_RUNS: Final[dict[str, dict[str, Any]]] = {
    "order:1": {**COMPLETED, "execution": {"status": "running", "lastUpdated": "2026-03-01T09:00:00.000Z"}},
    "order:2": COMPLETED,
    "order:3": {"kind": "ResumeState", "steps": [*COMPLETED["steps"].items()]},
}


@pytest.mark.parametrize("place", [BACKENDS["postgres"]], indirect=True, ids=str)
async def test_an_awaitly_table_of_postgres_is_imported(place: str) -> None:
    connection = await asyncpg.connect(place)
    await connection.execute(
        "CREATE TABLE awaitly_snapshots (id TEXT PRIMARY KEY, snapshot JSONB NOT NULL, updated_at TIMESTAMPTZ)"
    )
    for run_id, document in AWAITLY_RUNS.items():
        await connection.execute("INSERT INTO awaitly_snapshots VALUES ($1, $2, now())", run_id, json.dumps(document))
    rows = await connection.fetch("SELECT id, snapshot FROM awaitly_snapshots")
    await connection.close()
    await _import_runs(place, {row["id"]: json.loads(row["snapshot"]) for row in rows})


@pytest.mark.parametrize("place", [BACKENDS["mongo"]], indirect=True, ids=str)
async def test_an_awaitly_collection_of_mongodb_is_imported(place: str) -> None:
    client: AsyncMongoClient[dict[str, Any]] = await asyncio.to_thread(AsyncMongoClient, place)
    collection = client.get_default_database()["awaitly_snapshots"]
    for run_id, document in AWAITLY_RUNS.items():
        await collection.insert_one({"_id": run_id, "snapshot": document, "updatedAt": datetime.now(UTC)})
    found = {each["_id"]: each["snapshot"] async for each in collection.find()}
    await client.close()
    await _import_runs(place, found)


async def _import_runs(place: str, found: dict[str, dict[str, Any]]) -> None:
    assert found.keys() == AWAITLY_RUNS.keys()
    counted = Counted()
    async with store_at(place) as store:
        for run_id, document in found.items():
            await store.save(run_id, document if looks_like_snapshot(document) else parse_state(document))
        runtime = Runtime(store, [feed(counted)], concurrency=0)
        assert await runtime.sweep() == {}
        assert {info.id: info.status for info in await store.list()} == dict.fromkeys(found, "pending")
        for run_id in found:
            assert await feed(counted).run("1", id=run_id, store=store) == Ok(1)
        await runtime.close()
    assert counted.calls == []


async def test_row_libsql_local_file_and_remote_with_auth_token(tmp_path: Path) -> None:
    server = await asyncio.to_thread(libsql_server)
    for number, opened in enumerate((
        stores.libsql(f"file:{tmp_path}/local.db"),
        stores.libsql(server.url, auth_token="this-server-asks-for-none"),
    )):  # fmt: skip
        counted = Counted()
        assert await feed(counted).run("1", id=f"wf-{number}", store=opened) == Ok(2)
        assert await feed(counted).run("1", id=f"wf-{number}", store=opened) == Ok(2)
        assert counted.calls == ["user:1", "posts:1"]
        await opened.delete(f"wf-{number}")
        await opened.close()


async def test_row_a_users_own_workflow_store_with_four_methods() -> None:
    class Own:
        def __init__(self) -> None:
            self.runs: dict[str, StoredRun] = {}

        async def save(self, run: StoredRun) -> None:
            self.runs[run.run_id] = run

        async def load(self, run_id: str) -> StoredRun | None:
            return self.runs.get(run_id)

        async def delete(self, run_id: str) -> None:
            self.runs.pop(run_id, None)

        async def due(self, now: datetime, limit: int) -> list[str]:
            waking = [run for run in self.runs.values() if run.wake_at is not None and run.wake_at <= now]
            return [run.run_id for run in sorted(waking, key=lambda run: str(run.wake_at))][:limit]

    @workflow
    async def approval(ctx: Context) -> str:
        return str(await ctx.wait_for_signal("answer"))

    own = Own()
    runtime = Runtime(own, [approval])
    assert isinstance(await runtime.run(approval, id="a"), Suspended)
    assert (own.runs["a"].status, own.runs["a"].event_name, own.runs["a"].wake_at) == ("suspended", "answer", None)
    await runtime.signal("a", "answer", "yes")
    assert await runtime.sweep() == {"a": Ok("yes")}
    assert own.runs["a"].status == "completed"


@pytest.mark.parametrize("dsn", ["memory:", "files:{}/states", "sqlite:///{}/states.db"])
async def test_row_ready_made_key_value_stores(dsn: str, tmp_path: Path) -> None:
    async with await asyncio.to_thread(StatePersistence.open, dsn.format(tmp_path)) as states:
        run = await feed(Counted()).start("1")
        await run
        await states.save("wf-1", await run.resume_state())
        counted = Counted()
        assert await feed(counted).run("1", resume_state=await states.load("wf-1")) == Ok(2)
        assert counted.calls == []


async def test_row_durable_run_with_id_and_store(tmp_path: Path) -> None:
    counted = Counted()
    dsn = f"sqlite:///{tmp_path}/app.db"
    assert await feed(counted).run("1", id="wf-1", store=dsn) == Ok(2)
    assert await feed(counted).run("1", id="wf-1", store=dsn) == Ok(2)
    assert counted.calls == ["user:1", "posts:1"]


async def test_row_list_load_delete_clean_up_loop(tmp_path: Path) -> None:
    store = open_store(f"sqlite:///{tmp_path}/app.db")
    for number in range(3):
        await feed(Counted()).run("1", id=f"old-{number}", store=store)
    await feed(Counted()).run("1", id="new-1", store=store)
    for info in await store.list(RunFilter(prefix="old-")):
        loaded = await store.load(info.id)
        assert loaded is not None
        assert info.updated_at.tzinfo is not None
        if loaded.execution.status == "completed":
            await store.delete(info.id)
    assert [info.id for info in await store.list()] == ["new-1"]
    await store.close()


async def test_row_create_runtime_register_trigger_resume_signal_sweep_get() -> None:
    @workflow
    async def approval(ctx: Context, amount: int) -> str:
        answer = await ctx.wait_for_signal("answer")
        return f"{amount}: {answer}"

    runtime = Runtime(store=stores.memory(), workflows=[feed(Counted())], lease_ttl="10s")
    runtime.register(approval)
    assert isinstance(await runtime.run(approval, 5, id="a"), Suspended)
    assert isinstance(await runtime.resume("a"), Suspended)
    await runtime.signal("a", "answer", "yes")
    assert await runtime.sweep() == {"a": Ok("5: yes")}
    run = await runtime.get("a")
    assert run is not None
    assert await run.outcome() == Ok("5: yes")
    await runtime.close()


async def test_row_ctx_step_sleep_wait_for_event_payload_run_id_and_durations() -> None:
    clock = ManualClock()

    @workflow
    async def waits(ctx: Context, order: dict[str, int]) -> list[Any]:
        paid = await ctx.step("pay", lambda: order["cents"])
        await ctx.sleep("settle", "1h30m")
        await ctx.sleep("again", timedelta(minutes=30))
        await ctx.sleep("more", 60)
        await ctx.sleep_until("next morning", cron="0 9 * * *", tz="Europe/Berlin")
        return [ctx.run_id, paid, await ctx.wait_for_signal("go", timeout="2d", default="late")]

    runtime = Runtime(store=stores.memory(), workflows=[waits], clock=clock)
    assert isinstance(await runtime.run(waits, {"cents": 7}, id="w"), Suspended)
    for step in ("90m", "30m", "1m", "1d"):
        clock.advance(step)
        await runtime.sweep()
    await runtime.signal("w", "go", "now")
    assert await runtime.sweep() == {"w": Ok(["w", 7, "now"])}
    await runtime.close()

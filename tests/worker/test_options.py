"""What may be said when a run is started, and what is refused, in words that help and before anything is written."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from perdure import Context, Ok, Runtime, Suspended, Workflow, stores, workflow
from perdure.errors import InvalidInput
from perdure.state import MemoryCache
from perdure.store import Store
from perdure.testing import ManualClock
from perdure.testing.clock import EPOCH
from tests.patience import PATIENCE
from tests.worker.flows import client, greet

BAD_IDS = ["", "a\0b", "\ud800", "x" * 1025, "é" * 513]


@dataclass
class Order:
    cents: int


@workflow
async def pay(ctx: Context, order: Order, *, note: str = "") -> str:
    return f"{order.cents}{note}"


@pytest.mark.parametrize("bad", BAD_IDS)
async def test_a_bad_id_is_refused_and_nothing_is_written(store: Store, bad: str) -> None:
    async with client(store, greet) as runtime:
        for refused in (
            runtime.start(greet, "Ada", id=bad),
            runtime.run(greet, "Ada", id=bad),
            greet.options(id=bad, store=store).run("Ada"),
            greet.options(id=bad, store=store).start("Ada"),
        ):
            with pytest.raises(ValueError, match="a run's id"):
                await refused
        assert await runtime.list() == []


@pytest.mark.parametrize("bad", [7, None, b"g1"])
async def test_an_id_that_is_no_str_is_a_type_error(store: Store, bad: Any) -> None:
    async with client(store, greet) as runtime:
        with pytest.raises(TypeError, match=f"a run's id must be a str, not {type(bad).__name__}"):
            await runtime.start(greet, "Ada", id=bad)
        assert await runtime.list() == []


@pytest.mark.parametrize("good", ["x" * 1024, "é" * 512, "a/b c%", "'; drop table runs", "\n", "🦀"])
async def test_any_other_text_is_an_id(store: Store, good: str) -> None:
    async with client(store, greet) as runtime:
        assert await runtime.run(greet, "Ada", id=good) == Ok("hello Ada!")
        assert [info.id for info in await runtime.list()] == [good]


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ((), "missing a required argument: 'order'"),
        ((Order(1), Order(2)), "too many positional arguments"),
        (("one",), "order"),
        (({"cents": "many"},), "order"),
    ],
)
async def test_input_that_does_not_fit_is_refused_and_nothing_is_written(store: Store, args: Any, reason: str) -> None:
    async with client(store, pay) as runtime:
        calls: list[Any] = [
            runtime.start("pay", *args, id="p1"),
            runtime.run("pay", *args, id="p1"),
            pay.options(id="p1", store=store).run(*args),
            pay.options(id="p1", store=store).start(*args),
        ]
        for call in calls:
            with pytest.raises(InvalidInput, match=f"workflow 'pay' cannot take this input: .*{reason}"):
                await call
        assert await runtime.list() == []


async def test_input_that_cannot_be_stored_is_refused(store: Store) -> None:
    @workflow
    async def anything(ctx: Context, value: Any) -> None: ...

    async with client(store, anything) as runtime:
        with pytest.raises(InvalidInput, match="cannot be stored"):
            await runtime.start(anything, object(), id="x1")
        assert await runtime.list() == []


async def test_an_argument_is_rebuilt_by_its_annotation(store: Store) -> None:
    async with client(store, pay) as runtime:
        assert await runtime.run(pay, Order(5), id="p1") == Ok("5")
        assert await runtime.run("pay", {"cents": 5}, id="p2") == Ok("5")
        assert await pay.options(id="p3", store=store).run(order=Order(5), note="!") == Ok("5!")


@pytest.mark.parametrize("name", ["deps", "strict", "on_changed_arguments", "store", "retry_failed", "wait", "note"])
async def test_runtime_start_refuses_what_is_not_stored_and_says_why(store: Store, name: str) -> None:
    async with client(store, pay) as runtime:
        verbs: list[Any] = [runtime.start, runtime.run]
        for verb in verbs:
            with pytest.raises(TypeError, match=f"do not take {name}: another worker may take the run over.*by position"):
                await verb(pay, Order(1), **{name: None})
        assert await runtime.list() == []


async def test_an_unknown_option_is_a_type_error_that_lists_the_known_ones(store: Store) -> None:
    calls: list[Any] = [lambda: pay.run, lambda: pay.start]
    for call in calls:
        with pytest.raises(TypeError, match=r"unknown option note; there are .*id, .*store, .*wf\.options\(\.\.\.\)\.run"):
            await call()(Order(1), note="!")
    unknown: dict[str, Any] = {"ident": "p1"}
    with pytest.raises(TypeError, match="unknown option ident"):
        pay.options(**unknown)
    with pytest.raises(TypeError, match="unknown option ident"):
        pay.run_sync(Order(1), **unknown)
    with pytest.raises(TypeError, match="unknown option ident"):
        workflow(**unknown)(greet.fn)
    with pytest.raises(TypeError, match="Runtime has no option ident"):
        Runtime(store, **unknown)


async def test_a_choice_that_does_not_exist_is_refused(store: Store) -> None:
    wrong: dict[str, Any] = {"on_changed_arguments": "shout"}
    for make in (
        lambda: Runtime(store, **wrong),
        lambda: pay.options(**wrong),
        lambda: Workflow("pay", pay.fn, **wrong),
        lambda: workflow(**wrong)(pay.fn),
    ):
        with pytest.raises(ValueError, match="on_changed_arguments is one of warn, error, ignore, not 'shout'"):
            make()


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("queue", "", "a queue's name"),
        ("queue", 7, "a queue's name must be a str"),
        ("priority", "high", "priority must be a whole number"),
        ("priority", True, "priority must be a whole number"),
        ("priority", 1.5, "priority must be a whole number"),
        ("priority", 2**63, "priority"),
        ("start_at", "tomorrow", "start_at must be a datetime"),
        ("start_at", datetime(2026, 1, 1), "start_at .* has no time zone"),  # noqa: DTZ001 - refused
        ("metadata", [1], "metadata must be a dict"),
        ("metadata", {"a": object()}, "metadata must be a dict of JSON values"),
        ("metadata", {"a": (1, 2)}, "metadata must be a dict of JSON values"),
        ("metadata", {1: "a"}, "metadata must be a dict of JSON values"),
        ("metadata", {"perdure": {}}, "metadata has 'perdure', which only perdure writes"),
        ("metadata", {"a": float("nan")}, "metadata must be a dict of JSON values"),
    ],
)
async def test_a_stored_option_of_the_wrong_kind_is_refused(store: Store, option: str, value: Any, reason: str) -> None:
    async with client(store, greet) as runtime:
        with pytest.raises((TypeError, ValueError), match=reason):
            await runtime.start(greet, "Ada", **{option: value})
        assert await runtime.list() == []


async def test_queue_priority_and_metadata_are_stored_with_the_run(store: Store) -> None:
    async with client(store, greet) as runtime:
        await runtime.start(greet, "Ada", id="g1", queue="slow", priority=-3, metadata={"by": "ada", "tags": ["a", 1, None]})
        row = await store.get("g1")
        assert row is not None
        assert (row.queue, row.priority, row.metadata) == ("slow", -3, b'{"by":"ada","tags":["a",1,null]}')


async def test_a_run_starts_at_start_at_and_not_before(store: Store) -> None:
    clock = ManualClock()
    later = EPOCH + timedelta(hours=1)
    async with client(store, greet, clock=clock) as runtime:
        waiting = Suspended("g1", later, ())
        assert await runtime.run(greet, "Ada", id="g1", start_at=later) == waiting
        assert await runtime.resume("g1") == waiting
        assert await runtime.sweep() == {}
        clock.advance("1h")
        assert await runtime.sweep() == {"g1": Ok("hello Ada!")}


async def test_a_start_at_that_has_passed_is_now(store: Store) -> None:
    async with client(store, greet) as runtime:
        assert await runtime.run(greet, "Ada", id="g1", start_at=datetime(2020, 1, 1, tzinfo=UTC)) == Ok("hello Ada!")


class Deps:
    def __init__(self, url: str) -> None:
        self.url = url


def reading(**options: Any) -> Workflow[[], str]:
    async def read(ctx: Context[Any]) -> str:
        return f"{ctx.deps.url}"

    return Workflow("read", read, **options)


@pytest.mark.parametrize("make", [Deps, lambda url: {"url": url}], ids=["object", "mapping"])
async def test_the_nearest_deps_win(store: Store, make: Any) -> None:
    far, near = reading(deps=make("workflow")), make("call")
    async with client(store, far) as runtime:
        assert await runtime.run(far) == Ok("workflow")
        assert await far() == "workflow"
    async with client(store, far, deps=make("runtime")) as runtime:
        assert await runtime.run(far) == Ok("runtime")
    assert await far.run(store=store, deps=near) == Ok("call")
    assert await (await far.start(store=store, deps=near)) == "call"


async def test_a_mapping_of_deps_is_also_a_mapping_and_says_what_it_lacks(store: Store) -> None:
    @workflow(deps={"url": "u", "retries": 3})
    async def read(ctx: Context) -> list[Any]:
        return [ctx.deps["url"], ctx.deps.retries, len(ctx.deps), sorted(ctx.deps)]

    @workflow(deps={"url": "u"})
    async def misses(ctx: Context) -> None:
        assert ctx.deps.uri

    assert await read.run(store=store) == Ok(["u", 3, 2, ["retries", "url"]])
    with pytest.raises(AttributeError, match="deps has no 'uri'; it has url"):
        await misses()


@pytest.mark.parametrize(
    ("option", "value", "kind"),
    [
        ("lease_ttl", 0, ValueError),
        ("lease_ttl", "soon", ValueError),
        ("lease_ttl", None, TypeError),
        ("unload_grace", -1, ValueError),
        ("drain_after", "later", ValueError),
        ("workflows", [len], TypeError),
    ],
)
def test_a_runtime_option_of_the_wrong_kind_is_refused(option: str, value: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=option if option != "workflows" else "is not a workflow; decorate the function"):
        Runtime(stores.memory(), **{option: value})


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("on_event", [0, "", [], "print"]),
        ("cache", [0, "", [], MemoryCache]),
        ("strict", [None, 0, "x"]),
        ("retry_failed", [None, "x"]),
        ("wait", [None, 1]),
        ("metadata", [0, [], None, {"a": {1}}]),
        ("on_unknown_steps", [None, "", "raise"]),
        ("on_definition_change", [None, True]),
        ("on_changed_arguments", [None, "never"]),
    ],
)
async def test_an_option_of_the_wrong_kind_is_refused_and_nothing_is_written(
    store: Store, option: str, values: list[Any]
) -> None:
    for value in values:
        run: Any = greet.run
        with pytest.raises((TypeError, ValueError), match=option):
            await run("Ada", id="r1", store=store, **{option: value})
    assert await store.get("r1") is None


def test_a_workflow_is_an_async_function_that_takes_a_context() -> None:
    def plain(ctx: Context) -> None: ...

    async def alone() -> None: ...

    async def clashes(ctx: Context, *, store: str) -> None: ...

    with pytest.raises(TypeError, match=r"a workflow is an async function: write `async def plain\(ctx, \.\.\.\)`"):
        workflow(plain)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="the first parameter of workflow 'alone' must be its Context"):
        workflow(alone)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="the keyword-only parameter 'store' has the name of an option"):
        workflow(clashes)
    with pytest.raises(TypeError, match="decorates a function"):
        workflow("checkout")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="a workflow's name"):
        Workflow("", greet.fn)


async def test_configure_replaces_what_a_runtime_was_made_with_before_it_works() -> None:
    runtime = Runtime(stores.memory(), [greet], concurrency=0, only_queues=["mail"])
    other = stores.memory()
    runtime.configure(store=other, concurrency=2, only_queues=["default"])
    assert runtime.store is other
    async with asyncio.timeout(PATIENCE), runtime:
        assert await (await runtime.start(greet, "Ada")) == "hello Ada!"
        (worker,) = await runtime.workers()
        assert (worker.concurrency, worker.queues) == (2, ("default",))
        with pytest.raises(RuntimeError, match="comes before a Runtime is entered"):
            runtime.configure(concurrency=3)
    with pytest.raises(RuntimeError, match="comes before a Runtime is entered"):
        runtime.configure(concurrency=3)
    bad_ones: list[dict[str, Any]] = [{"concurrency": -1}, {"only_queues": []}, {"concurrency": 2**64}]
    for bad in bad_ones:
        with pytest.raises(ValueError, match=r"concurrency must be|only_queues= is empty"):
            Runtime(stores.memory()).configure(**bad)

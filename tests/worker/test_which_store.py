"""Which store a run is kept in: the one that was passed, the one PERDURE_STORE names, or memory, and then that is said."""

from __future__ import annotations

import asyncio
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perdure import Ok, PerdureWarning, Runtime, Suspended, open_store, stores
from perdure.stores import _process_memory
from tests.patience import PATIENCE
from tests.worker.flows import ask, greet, nap


@pytest.fixture(autouse=True)
def process_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A store in memory that no other test has used, and no PERDURE_STORE."""
    monkeypatch.delenv("PERDURE_STORE", raising=False)
    _process_memory.cache_clear()
    yield
    _process_memory.cache_clear()


async def test_a_dsn_is_opened_and_closed_again(tmp_path: Path) -> None:
    dsn = f"sqlite:///{tmp_path / 'app.db'}"
    assert await greet.options(id="g1", store=dsn).run("Ada") == Ok("hello Ada!")
    async with Runtime(dsn, concurrency=0) as runtime:
        assert [info.id for info in await runtime.list()] == ["g1"]


async def test_perdure_store_names_the_store_when_none_is_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_STORE", f"sqlite:///{tmp_path / 'app.db'}")
    await greet.options(id="g1").run("Ada")
    await (await greet.options(id="g2").start("Ada"))
    async with Runtime(workflows=[greet], concurrency=0) as runtime:
        assert {info.id for info in await runtime.list()} == {"g1", "g2"}
        assert runtime.store.durability == "disk"
    async with Runtime(stores.memory(), concurrency=0) as runtime:  # a store that is passed wins
        assert await runtime.list() == []


async def test_an_empty_perdure_store_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_STORE", "")
    assert Runtime().store is Runtime().store
    assert Runtime().store.durability == "process"


async def test_a_perdure_store_that_cannot_be_opened_is_an_error_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_STORE", "oracle://ada:hunter2@host/db")
    with pytest.raises(ValueError, match="begins with 'oracle:'") as refused:
        Runtime()
    assert "hunter2" not in str(refused.value)


async def test_an_id_without_any_store_is_said_once_to_survive_nothing() -> None:
    async def use_ids() -> None:
        assert await greet.options(id="g1").run("Ada") == Ok("hello Ada!")
        await (await greet.options(id="g2").start("Ada"))
        assert isinstance(await ask.run(id="a1"), Suspended)
        async with Runtime(workflows=[greet], concurrency=0) as runtime:
            await runtime.run(greet, "Ada", id="g3")

    with pytest.warns(PerdureWarning) as said:
        await use_ids()
    (warning,) = said
    assert warning.filename == __file__
    assert str(warning.message) == (
        "run 'g1' has an id, but there is no store: it is kept in memory and gone when this process ends; "
        'pass store="sqlite:///app.db" or set PERDURE_STORE'
    )


async def test_a_run_whose_state_the_caller_keeps_is_not_warned_about() -> None:
    for options in ({"resume_state": None}, {"snapshot": lambda: None}):
        assert await greet.options(id=f"g {list(options)}", **options).run("Ada") == Ok("hello Ada!")


@pytest.mark.parametrize("verb", ["run", "start"])
async def test_a_runtime_without_a_store_says_that_a_run_with_an_id_survives_nothing(verb: str) -> None:
    async with Runtime(workflows=[greet], concurrency=0) as runtime:
        await getattr(runtime, verb)(greet, "Ada")
        with pytest.warns(PerdureWarning, match="run 'g1' has an id, but there is no store"):
            await getattr(runtime, verb)(greet, "Ada", id="g1")


@pytest.mark.filterwarnings("ignore:run 'g1' has an id")
async def test_runs_with_an_id_and_no_store_share_one_memory_in_the_process() -> None:
    assert await greet.options(id="g1").run("Ada") == Ok("hello Ada!")
    async with Runtime(concurrency=0) as runtime:
        assert [info.id for info in await runtime.list()] == ["g1"]
    async with Runtime(concurrency=0) as again:  # a runtime that is left does not close it for the others
        assert [info.id for info in await again.list()] == ["g1"]


async def test_a_run_without_id_and_store_leaves_nothing_behind() -> None:
    assert await greet.run("Ada") == Ok("hello Ada!")
    async with Runtime(concurrency=0) as runtime:
        assert await runtime.list() == []


@pytest.mark.filterwarnings("ignore:run 'g1' has an id")
def test_no_file_is_created_implicitly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert greet.run_sync("Ada") == Ok("hello Ada!")
    assert greet.options(id="g1").run_sync("Ada") == Ok("hello Ada!")
    with Runtime(workflows=[greet]).sync as runtime:
        assert runtime.start(greet, "Ada").result() == "hello Ada!"
    assert list(tmp_path.iterdir()) == []


async def test_suspending_in_a_memory_nobody_asked_for_is_said_once() -> None:
    async def suspend_often() -> None:
        async with Runtime(workflows=[ask], concurrency=0, unload_grace=0) as runtime:
            for _ in range(3):
                assert isinstance(await runtime.run(ask), Suspended)

    with pytest.warns(PerdureWarning) as said:
        await suspend_often()
    (warning,) = said
    assert re.fullmatch(
        r"run '[-0-9a-f]+' is suspended in memory and gone when this process ends; "
        r'pass store="sqlite:///app\.db" or set PERDURE_STORE',
        str(warning.message),
    )


async def test_suspending_a_run_without_an_id_is_said_too() -> None:
    with pytest.warns(PerdureWarning, match="is suspended in memory"):
        assert isinstance(await nap.run(), Suspended)


async def test_where_warnings_are_errors_whoever_waits_for_the_run_hears_of_it_all_the_same() -> None:
    said: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(str(context["exception"])))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(await asyncio.wait_for(ask.run(), PATIENCE), Suspended)
    assert len(said) == 1
    assert "is suspended in memory" in said[0]


async def test_a_memory_that_was_asked_for_is_not_warned_about() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(await ask.run(id="a1", store=stores.memory()), Suspended)
        assert isinstance(await ask.run(id="a1", store="memory:"), Suspended)
        assert await greet.run("Ada") == Ok("hello Ada!")


@pytest.mark.parametrize("wrong", [7, Path("app.db"), {}, stores.memory, type(stores.memory())])
async def test_something_that_is_no_store_is_a_type_error_that_shows_a_dsn(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"store= takes a store or a DSN such as 'sqlite:///app.db'"):
        Runtime(wrong)
    with pytest.raises(TypeError, match=r"store= takes a store or a DSN"):
        await ask.run(id="a1", store=wrong)


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://ada:hunter2@[host/db",
        "sqlite://ada:hunter2@host/db",
        "hunter2",
        "ada@hunter2:5432/db",
        "redis://:hunter2@host?password",
        "postgresql://ada:hun?ter2@host/db",
        "://hunter2",
        "sqlite:hunter2",
        "memory:hunter2",
        "sqlite:///app.db?hunter2",
        "memory:?password=hunter2",
    ],
)
def test_what_is_wrong_with_a_dsn_is_said_without_its_secrets(dsn: str) -> None:
    with pytest.raises(ValueError, match=r"DSN") as refused:
        open_store(dsn)
    assert "hunter2" not in str(refused.value)
    assert "ter2" not in str(refused.value)
    assert "ter2" not in str(refused.value.__cause__ or "")


def test_a_dsn_takes_the_options_of_its_store(tmp_path: Path) -> None:
    one = open_store(f"sqlite:///{tmp_path / 'app.db'}?table=flows&prefix=a")
    assert one.key == stores.sqlite(tmp_path / "app.db", table="flows", prefix="a").key
    with pytest.raises(ValueError, match=r"a sqlite: DSN does not take these options: .*'tabel'"):
        open_store(f"sqlite:///{tmp_path / 'app.db'}?tabel=flows")
    with pytest.raises(TypeError, match=r"a DSN is a str like sqlite:///relative.db"):
        open_store(tmp_path)  # type: ignore[arg-type]

"""The workflows of the examples survive a crash at every call of the store."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest

from perdure import Ok, testing

EXAMPLES: Final = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """The module of an example, not run."""
    spec = importlib.util.spec_from_file_location(f"example_{request.param}", EXAMPLES / f"{request.param}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its classes are found there when a value is rebuilt
    log, level = logging.getLogger("perdure"), logging.getLogger("perdure").level
    spec.loader.exec_module(module)
    log.setLevel(level)  # which an example may set for itself
    yield module
    del sys.modules[spec.name]


def using(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("example", [name], indirect=True)


@using("demo")
async def test_demo(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    done: list[str] = []

    class Shop:
        async def charge(self, order: Any) -> Any:
            done.append(f"charge {order.cents}")
            return example.Payment("pay_1", order.cents)

        async def reserve(self, item: str) -> str:
            done.append(f"reserve {item}")
            return f"{item} in bay"

        async def ship(self, bays: list[str]) -> str:
            done.append(f"ship {len(bays)}")
            return "parcel-7"

    Shop.charge.__annotations__["return"] = example.Payment
    order = example.Order("order-1", 4250, ["teapot", "cup"])
    report = await testing.crash_everywhere(example.process_order, order, effects=done, deps=Shop())
    assert report.outcome == Ok("parcel-7")
    assert report.by_verb["record"] == 8


@using("operate_runs")
async def test_operate_runs(example: Any) -> None:
    example.carrier["is_down"] = False
    report = await testing.crash_everywhere(example.checkout, 1, effects=lambda: example.charged + example.shipped)
    assert report.outcome == Ok("receipt 1, parcel 1")


@using("push_store")
async def test_push_store(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    report = await testing.crash_everywhere(example.subscription, 5)
    assert report.outcome == Ok(10)


@using("worker_process")
async def test_worker_process(example: Any, tmp_path: Path) -> None:
    report = await testing.crash_everywhere(example.ship, 1, str(tmp_path))
    assert report.outcome == Ok("parcel-1")
    sent = await asyncio.to_thread(lambda: [path.read_text() for path in tmp_path.iterdir()])
    assert sent == ["parcel-1"]


@using("sagas")
@pytest.mark.parametrize("is_free", [True, False])
async def test_sagas(example: Any, is_free: bool, capsys: pytest.CaptureFixture[str]) -> None:
    if is_free:
        example.free.add("car")
    report = await testing.crash_everywhere(example.trip)
    assert isinstance(report.outcome, Ok) is is_free
    assert report.crash_points > 20


@using("endless")
async def test_endless(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    shipped: list[str] = []

    def ship(number: int, what: str, key: str) -> str:
        shipped.append(f"{number} {what} {key}")
        return what

    def prepare(rt: testing.VirtualRuntime) -> None:
        rt.stub(example.ship, calls=ship)
        for what in ("tea", "rice", example.LAST):
            rt.signal_when_waiting("order", what)

    report = await testing.crash_everywhere(example.orders, [], effects=shipped, prepare=prepare)
    assert report.outcome == Ok("tea, rice, salt")
    assert report.by_verb["continue_as"] == 4
    assert len(set(shipped)) == 3


@using("testing_workflows")
async def test_testing_workflows(example: Any) -> None:
    for test in example.TESTS:
        await test()


@using("streams")
async def test_streams(example: Any) -> None:
    report = await testing.crash_everywhere(example.ask, "what is it?")
    assert report.outcome == Ok("The answer is forty-two")


@using("children")
@pytest.mark.parametrize("items", [["book", "pen"], ["glass", "piano"]])
async def test_children(example: Any, items: list[str]) -> None:
    report = await testing.crash_everywhere(example.order, items, workflows=[example.pack, example.ask_carrier])
    assert isinstance(report.outcome, Ok) is ("glass" not in items)
    assert report.crash_points > 40


@using("approvals")
@pytest.mark.parametrize("is_approved", [True, False])
async def test_approvals(example: Any, is_approved: bool) -> None:
    def prepare(rt: testing.VirtualRuntime) -> None:
        rt.stub(example.mail_link, returns=None)
        if is_approved:
            rt.approve_when_waiting("release", by="ada")
        else:
            rt.reject_when_waiting("release", by="bob", reason="not today")

    report = await testing.crash_everywhere(example.release, "4.2", effects=example.deployed, prepare=prepare)
    assert report.outcome == Ok("approved by ada" if is_approved else "not deployed")
    assert bool(example.deployed) is is_approved

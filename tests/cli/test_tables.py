"""What lists show: ids whole, plain columns for programs, what runs wait for, and nothing under a name that no user wrote."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from perdure import stores
from perdure.cli.options import load_runtime
from perdure.cli.output import safe_json
from perdure.model.records import NewRun
from perdure.store import require
from tests.cli.conftest import Command, Sweep
from tests.cli.terminal import on_terminal

LONG = "checkout-of-2026-11-18-for-customer-7f3d9b1c-a9e2-4f60-8f5e-0a4d6c2b7e11-with-the-voucher-autumn"
MORE = """
from dataclasses import dataclass


@dataclass
class Order:
    sku: str


async def reserve(order: Order) -> Order:
    return order


async def release(_: Order) -> None:
    raise RuntimeError("warehouse is closed")


@workflow
async def saga(ctx: Context) -> None:
    await ctx.step(reserve, Order("lamp"), compensate=release)
    await ctx.step(decline)


@workflow
async def saga_retried(ctx: Context) -> None:
    await ctx.step(reserve, Order("lamp"), compensate=release_later)
    await ctx.step(decline)


@step(retry=Retry(attempts=9, wait_initial="1h", wait_max="1h"))
async def release_later(_: Order) -> None:
    raise RuntimeError("warehouse is closed")


@workflow
async def asks(ctx: Context) -> str:
    return repr(await ctx.approve("refund", Order("lamp"), expires_in="3d"))


@workflow
async def endless(ctx: Context) -> None:
    await ctx.sleep("nap", "9d")


for more in (saga, saga_retried, asks, endless):
    runtime.register(more)
"""


@pytest.fixture
def _more(directory: Path) -> None:
    program = directory / "app.py"
    program.write_text(program.read_text().replace("Retry, Runtime, workflow", "Retry, Runtime, step, workflow") + MORE)


def test_ids_are_whole_on_a_terminal_and_in_a_pipe(perdure: Command, sweep: Sweep) -> None:
    perdure("start", "app:runtime", "checkout", "--input", '"o"', "--id", LONG)
    perdure("start", "app:runtime", "retried", "--id", "later")
    sweep()
    for columns in (40, 100):
        shown = on_terminal("runs", columns=columns).splitlines()
        assert {line.split()[0] for line in shown if not line.startswith(" ")} == {"id", LONG, "later"}
    assert {line.split()[0] for line in perdure("runs").out.splitlines()} == {"id", LONG, "later"}


def test_a_pipe_gets_a_line_for_each_row_and_no_cell_but_the_last_is_empty(perdure: Command, sweep: Sweep) -> None:
    for n in range(3):
        perdure("start", "app:runtime", "retried", "--id", f"later-{n}")
    perdure("start", "app:runtime", "checkout", "--input", '"o"', "--id", "order-1")
    sweep()
    for arguments, columns in ((["runs"], 5), (["show", "order-1"], 6)):
        shown = perdure(*arguments).out
        assert shown.isascii()
        table = shown[shown.rindex("\n\n") + 2 :] if "\n\n" in shown else shown
        for line in table.splitlines():
            assert len([cell for cell in line.split("  ") if cell.strip()]) >= columns, line
    assert len(perdure("runs").out.splitlines()) == 5


def test_runs_says_what_a_run_waits_for_and_that_a_step_is_tried_again(perdure: Command, sweep: Sweep) -> None:
    for workflow, *more in (("checkout", "--input", '"o"'), ("retried",), ("refund", "--input", '"o"')):
        perdure("start", "app:runtime", workflow, *more, "--id", workflow)
    sweep()
    for shown in (perdure("runs").out, on_terminal("runs", columns=160)):
        lines = {line.split()[0]: line for line in shown.splitlines()}
        assert "waits for signal 'approve' until 20" in lines["checkout"]
        assert "waits for approval 'refund' until 20" in lines["refund"]
        assert "tries step 'decline' again at 20" in lines["retried"]
        assert "after 1 failed attempt: RuntimeError: declined" in lines["retried"]
    assert "waits for signal 'approve' until 20" in on_terminal("runs", columns=80)


@pytest.mark.usefixtures("_more")
def test_nothing_is_shown_under_a_name_that_no_user_wrote(perdure: Command, sweep: Sweep) -> None:
    for workflow in ("saga", "saga_retried", "asks"):
        perdure("start", "app:runtime", workflow, "--id", workflow)
    perdure("start", "app:runtime", "checkout", "--input", '"o"', "--id", "stopped")
    sweep()
    perdure("cancel", "stopped")
    sweep()
    shown = {run_id: perdure("show", run_id).out for run_id in ("saga", "saga_retried", "asks", "stopped")}
    everything = "".join([*shown.values(), perdure("runs").out, perdure("approvals").out, perdure("runs", "--json").out])
    (line,) = perdure("runs", "--json", "--workflow", "asks").documents
    assert line["waiting_for"] == [{"kind": "approval", "name": "refund"}]
    perdure("approve", "asks", "refund", "--by", "ada")
    sweep()
    everything += "".join(perdure("show", run_id, "--json").out for run_id in shown)
    for own in ("%", "perdure:", "$class", "nonce"):
        assert own not in everything
    assert "reserve  compensation  failed" in shown["saga"]
    assert "compensation of reserve failed: RuntimeError: warehouse is closed" in shown["saga"]
    assert "tries the compensation of 'reserve' again at 20" in shown["saga_retried"]
    assert 'asks about {"sku":"lamp"}' in shown["asks"]
    assert "the run was cancelled" in shown["stopped"]


@pytest.mark.usefixtures("_more")
def test_a_deadline_has_no_traceback(perdure: Command, sweep: Sweep) -> None:
    runtime = load_runtime("app:runtime")

    async def begin() -> None:
        await runtime.start("endless", id="late", deadline="1ms")
        await runtime.close()

    asyncio.run(begin())
    sweep()
    shown = perdure("show", "late").out
    assert "the run failed: DeadlineExceeded: " in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize("command", [["runs"], ["runs", "--stuck"], ["approvals"], ["stream", "order-1", "log"]])
def test_a_number_that_no_store_holds_is_refused(perdure: Command, sweep: Sweep, command: list[str]) -> None:
    perdure("start", "app:runtime", "checkout", "--input", '"o"', "--id", "order-1")
    option = "--start" if "stream" in command else "--limit"
    done = perdure(*command, option, str(2**64))
    assert (done.code, done.out) == (2, "")
    assert f"not {2**64}" in done.err


def test_json_has_escapes_for_what_acts_upon_a_terminal() -> None:
    text = "a\x1b[2J\x7f\x9b\u202eb\u2028\u200b\U000e0001 é 火"
    encoded = safe_json(json.dumps({"text": text}, ensure_ascii=False).encode())
    assert json.loads(encoded) == {"text": text}
    assert all(char.isprintable() for char in encoded)
    assert "é 火" in encoded


def test_json_of_a_hostile_id_is_harmless(perdure: Command, sweep: Sweep) -> None:
    sweep()
    asyncio.run(_put_run("evil\u202e\x9b1m"))
    printed = perdure("runs", "--json")
    assert printed.documents[0]["id"] == "evil\u202e\x9b1m"
    assert "\u202e" not in printed.out
    assert "\x9b" not in perdure("export", "evil\u202e\x9b1m").out


async def _put_run(run_id: str) -> None:
    store = stores.sqlite("app.db")
    await store.create(NewRun(id=run_id, workflow="checkout", input=b"[[],{}]", input_hash=b"1", seed=b"2"))
    assert await require(store, "operators").count() == 1
    await store.close()

"""Each command does what its verb of the library does, says so to people and to programs, and has the exit code for it."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from pathlib import Path

import pytest

from perdure import Runtime, stores
from perdure.backends.sql.schema import VERSION
from perdure.model.records import NewRun
from perdure.store import require
from perdure.stores import open_store
from tests.backends.places import on_postgres
from tests.cli.conftest import Command, Sweep
from tests.cli.terminal import on_terminal


@pytest.fixture
def started(perdure: Command, sweep: Sweep) -> None:
    """Three runs that a worker has driven: one waits, one has failed, one is tried again later."""
    assert perdure("start", "app:runtime", "checkout", "--input", '"o"', "--input", "500", "--id", "order-1").code == 0
    assert perdure("start", "app:runtime", "broken", "--id", "bad").code == 0
    assert perdure("start", "app:runtime", "retried", "--id", "later").code == 0
    sweep()


def test_start_prints_the_id_and_the_same_start_is_the_same_run(perdure: Command) -> None:
    first = perdure("start", "app:runtime", "checkout", "--input", '"o"', "--id", "order-1")
    assert first == (0, "order-1\n", "")
    assert perdure("start", "app:runtime", "checkout", "--input", '"o"', "--id", "order-1", "--json").document == {
        "id": "order-1"
    }
    assert len(perdure("runs", "--json").documents) == 1
    assert perdure("start", "app:runtime", "checkout", "--input", '"p"', "--id", "order-1").code == 1
    assert len(perdure("start", "app:runtime", "checkout", "--input", '"p"').out) == len("00000000-0000-0000-0000-000000000000\n")


@pytest.mark.usefixtures("started")
def test_runs_filters_as_list_does(perdure: Command) -> None:
    def ids(*options: str) -> set[str]:
        return {line["id"] for line in perdure("runs", "--json", *options).documents}

    assert ids() == {"order-1", "bad", "later"}
    assert ids("--status", "failed") == {"bad"}
    assert ids("--workflow", "checkout") == {"order-1"}
    assert ids("--prefix", "or") == {"order-1"}
    assert ids("--status", "failed", "--status", "dead") == {"bad"}
    assert ids("--status", "failed", "--status", "suspended") == {"order-1", "bad", "later"}
    assert ids("--queue", "default") == {"order-1", "bad", "later"}
    assert ids("--queue", "mail") == set()
    assert ids("--since", "1h", "--workflow", "checkout") == {"order-1"}
    assert ids("--until", "1h") == ids("--since", "2999-01-01") == ids("--until", "2020-01-01T10:00:00+02:00") == set()
    assert ids("--metadata", "customer=c-7") == set()
    assert len(ids("--limit", "2")) == 2
    shown = perdure("runs").out
    assert shown.splitlines()[0].split() == ["id", "workflow", "status", "changed", "(UTC)", "detail"]
    assert "order-1  checkout  suspended" in shown
    assert perdure("runs", "--limit", "1").err == "perdure: 1 run at most is shown; --limit shows more\n"
    assert perdure("runs", "--limit", "2").err == "perdure: 2 runs at most are shown; --limit shows more\n"


def test_runs_by_metadata(perdure: Command, sweep: Sweep) -> None:
    sweep()

    async def prepare() -> None:
        store = stores.sqlite("app.db")
        for run_id, metadata in (("text", b'{"customer":"c-7"}'), ("number", b'{"n":3}'), ("digits", b'{"n":"3"}')):
            new = NewRun(id=run_id, workflow="checkout", input=b"[[],{}]", input_hash=b"1", seed=b"2", metadata=metadata)
            await store.create(new)
        await store.close()

    asyncio.run(prepare())
    expected = {"customer=c-7": ["text"], "n=3": ["number"], 'n="3"': ["digits"], "n=null": [], "customer=c=7": []}
    for option, ids in expected.items():
        assert [line["id"] for line in perdure("runs", "--json", "--metadata", option).documents] == ids


def test_runs_says_that_there_are_none(perdure: Command, sweep: Sweep) -> None:
    sweep()
    assert perdure("runs") == (0, "no runs\n", "")
    assert perdure("runs", "--json") == (0, "", "")


@pytest.mark.usefixtures("started")
def test_stuck_runs_have_a_problem_or_were_not_claimed_in_time(perdure: Command) -> None:
    assert perdure("runs", "--stuck", "--json").documents == []

    async def prepare() -> None:
        store = stores.sqlite("app.db")
        lease = (await store.claim(1, 30, [("checkout", 1)], now=2**51)).claims[0].lease
        await store.release(lease, problem="it does not fit")
        old = NewRun(id="old", workflow="checkout", input=b"[[],{}]", input_hash=b"1", seed=b"2")
        await store.create(old, now=10**15)
        await store.create(NewRun(id="fresh", workflow="checkout", input=b"[[],{}]", input_hash=b"1", seed=b"2"))
        await store.close()

    asyncio.run(prepare())
    found = {line["id"]: line["problem"] for line in perdure("runs", "--stuck", "--json").documents}
    assert found.keys() == {"order-1", "old"}
    assert found["order-1"] == "it does not fit"
    assert found["old"].endswith("s, and no worker has claimed it")
    assert len(perdure("runs", "--stuck", "--limit", "1", "--json").documents) == 1
    assert [line["id"] for line in perdure("runs", "--stuck", "--prefix", "ol", "--json").documents] == ["old"]
    assert perdure("runs", "--stuck", "--workflow", "broken", "--json").documents == []
    assert perdure("queues", "set", "default", "--rate", "1/d").code == 0
    (old,) = perdure("runs", "--stuck", "--prefix", "old", "--json").documents
    assert old["problem"].endswith("no worker has claimed it; its queue 'default' has limits")


@pytest.mark.usefixtures("started")
def test_show_has_the_timeline(perdure: Command) -> None:
    run = perdure("show", "order-1", "--json").document
    assert (run["status"], run["workflow"], run["input"]) == ("suspended", "checkout", [["o", 500], {}])
    assert run["waiting_for"] == [{"kind": "signal", "name": "approve"}]
    charge, approve = run["steps"]
    assert (charge["key"], charge["kind"], charge["status"], charge["value"], charge["attempts"]) == (
        "charge", "step", "completed", "paid 500", 1,
    )  # fmt: skip
    assert 0 <= charge["seconds"] < 60
    assert (approve["key"], approve["kind"], approve["status"]) == ("approve", "signal", "waiting")
    assert approve["until"] == run["wake_at"]
    shown = perdure("show", "order-1").out
    assert "run order-1: checkout, suspended\n" in shown
    assert "waits for signal 'approve' until 20" in shown
    assert '"paid 500"' in shown


@pytest.mark.usefixtures("started")
def test_show_has_errors_with_their_tracebacks_and_no_escape_sequence(perdure: Command) -> None:
    run = perdure("show", "bad", "--json").document
    assert (run["status"], run["error"]["type"], run["error"]["message"]) == ("failed", "RuntimeError", "declined \x1b[31m")
    assert run["steps"][1]["error"]["traceback"].startswith("Traceback (most recent call last)")
    shown = perdure("show", "bad").out
    assert "decline failed: RuntimeError: declined \\x1b[31m\n  Traceback (most recent call last):" in shown
    assert "the run failed: RuntimeError: declined" in shown
    assert "\x1b" not in shown


@pytest.mark.usefixtures("started")
def test_show_has_the_next_try_of_a_step(perdure: Command) -> None:
    run = perdure("show", "later", "--json").document
    (step,) = run["steps"]
    assert (step["status"], step["attempts"], step["error"]["type"]) == ("retrying", 1, "RuntimeError")
    assert step["until"] == run["wake_at"]
    assert "next try 20" in perdure("show", "later").out


@pytest.mark.usefixtures("started")
def test_a_long_value_is_cut_for_people_and_whole_for_programs(perdure: Command, sweep: Sweep) -> None:
    perdure("signal", "order-1", "approve", "--payload", json.dumps("x" * 1000))
    sweep()
    run = perdure("show", "order-1", "--json").document
    assert run["status"] == "completed"
    assert run["value"].endswith("x" * 1000)
    assert max(map(len, perdure("show", "order-1").out.splitlines())) < 300
    table = on_terminal("show", "order-1").partition("step ")[2]
    assert max(map(len, table.splitlines())) <= 100


@pytest.mark.usefixtures("started")
def test_signal_delivers_its_payload(perdure: Command, sweep: Sweep) -> None:
    assert perdure("signal", "order-1", "approve", "--payload", '"yes"', "--dedupe", "1") == (
        0,
        "sent 'approve' to run 'order-1'\n",
        "",
    )
    assert "due since" in perdure("show", "order-1").out
    assert perdure("signal", "order-1", "approve", "--dedupe", "1", "--json").document == {"id": "order-1", "signal": "approve"}
    sweep()
    assert perdure("show", "order-1", "--json").document["value"] == "o paid 500 yes"


def test_stream_shows_items_and_follows_them_to_the_end(perdure: Command, directory: Path, sweep: Sweep) -> None:
    emits = """

@workflow
async def emits(ctx: Context) -> None:
    await ctx.emit("log", "one")
    await ctx.emit("log", {"n": 2})
    await ctx.wait_for_signal("go")
    await ctx.emit("log", "three")


runtime.register(emits)
"""
    (directory / "app.py").write_text((directory / "app.py").read_text() + emits)
    perdure("start", "app:runtime", "emits", "--id", "run")
    sweep()
    assert perdure("stream", "run", "log") == (0, 'one\n{"n":2}\n', "")
    assert perdure("stream", "run", "log", "--start", "2") == (0, "", "")
    lines = perdure("stream", "run", "log", "--start", "1", "--json").documents
    assert [(line["position"], line["value"], line["key"], line["attempt"]) for line in lines] == [(1, {"n": 2}, None, 0)]
    perdure("signal", "run", "go")
    sweep()
    assert perdure("stream", "run", "log", "--start", "1", "--follow").out == '{"n":2}\nthree\n'
    assert perdure("stream", "none", "log").code == 1


@pytest.mark.usefixtures("started")
def test_fork_starts_a_run_from_a_step(perdure: Command, sweep: Sweep) -> None:
    assert perdure("fork", "order-1", "--from", "approve", "--id", "again", "--json").document == {
        "id": "again",
        "forked_from": "order-1",
    }
    assert perdure("fork", "order-1", "--from", "charge").out.strip() != ""
    assert "did you mean 'charge'?" in perdure("fork", "order-1", "--from", "chrge").err
    assert "run 'again' exists already" in perdure("fork", "order-1", "--from", "charge", "--id", "again").err
    perdure("signal", "again", "approve", "--payload", '"yes"')
    sweep()
    assert perdure("show", "again", "--json").document["value"] == "o paid 500 yes"
    assert perdure("show", "order-1", "--json").document["status"] == "suspended"


@pytest.mark.usefixtures("started")
def test_cancel_and_retry(perdure: Command, sweep: Sweep) -> None:
    assert perdure("cancel", "order-1", "--json").document == {"id": "order-1", "cancel_requested": True}
    assert "it was asked to stop" in perdure("show", "order-1").out
    sweep()
    assert perdure("show", "order-1", "--json").document["status"] == "cancelled"
    assert perdure("retry", "order-1", "--json").document == {"id": "order-1", "status": "pending"}
    assert perdure("show", "order-1", "--json").document["status"] == "pending"
    assert perdure("retry", "bad").code == 0


@pytest.mark.usefixtures("started")
def test_hold_and_unhold(perdure: Command) -> None:
    assert perdure("hold", "order-1", "--json").document == {"id": "order-1", "held": True}
    assert "`perdure unhold order-1` lets it go on" in perdure("show", "order-1").out
    assert perdure("unhold", "order-1").code == 0
    assert perdure("show", "order-1", "--json").document["held"] is False


class Terminal(io.StringIO):
    """What a person types."""

    def isatty(self) -> bool:
        return True


@pytest.mark.usefixtures("started")
def test_filters_change_many_runs(perdure: Command, sweep: Sweep) -> None:
    """The runs are order-1, which waits, bad, which failed, and later, which is tried again."""
    assert perdure("hold", "--all", "--yes").out == "2 runs put on hold, 0 refused\n"
    assert perdure("unhold", "--prefix", "lat", "--yes", "--json").document == {"done": 1, "refused": 0, "refusals": []}
    assert perdure("unhold", "--status", "suspended", "--yes").out == "2 runs taken off hold, 0 refused\n"
    assert perdure("retry", "--status", "failed", "--yes").out == "1 run made pending again, 0 refused\n"
    sweep()
    assert perdure("cancel", "--workflow", "checkout", "--yes").code == 0
    sweep()
    assert perdure("runs", "--status", "cancelled", "--json").documents[0]["id"] == "order-1"
    assert perdure("delete", "--since", "1h", "--yes").out == "2 runs deleted, 0 refused\n"
    assert [line["id"] for line in perdure("runs", "--json").documents] == ["later"]


@pytest.mark.usefixtures("started")
def test_refused_runs_are_reported_and_give_exit_code_1(perdure: Command) -> None:
    done = perdure("cancel", "--status", "failed", "--status", "suspended", "--yes")
    assert (done.code, done.out) == (1, "2 runs asked to stop, 1 refused\nrun 'bad' has ended (failed) and takes nothing more\n")
    refused = perdure("cancel", "--status", "failed", "--yes", "--json")
    assert (refused.code, refused.document["refused"]) == (1, 1)
    assert refused.document["refusals"][0]["error"] == "RunFinished"


@pytest.mark.usefixtures("started")
def test_many_runs_are_changed_once_their_number_was_confirmed(perdure: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal("\n"))
    refused = perdure("cancel", "--all")
    assert (refused.code, refused.out) == (1, "")
    assert refused.err == "Cancel 2 runs? [y/N] perdure: nothing was changed\n"
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    assert perdure("cancel", "--all").out == "2 runs asked to stop, 0 refused\n"


@pytest.mark.usefixtures("started")
def test_delete_asks(perdure: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    assert perdure("delete", "bad").code == 2  # stdin is no terminal
    monkeypatch.setattr(sys, "stdin", Terminal("\n"))
    refused = perdure("delete", "bad")
    assert (refused.code, refused.out) == (1, "")
    assert refused.err.startswith("Delete run 'bad' (failed) and everything recorded for it? [y/N] ")
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    assert perdure("delete", "bad").out == "run 'bad' is deleted\n"
    assert perdure("delete", "bad", "--yes").code == 1
    assert perdure("delete", "later", "--yes", "--json").document == {"id": "later", "deleted": True}
    assert [line["id"] for line in perdure("runs", "--json").documents] == ["order-1"]


@pytest.mark.usefixtures("started")
def test_purge_deletes_what_ended_long_ago(perdure: Command) -> None:
    assert perdure("purge", "--older-than", "30d").out == "deleted 0 runs\n"
    assert perdure("purge", "--older-than", "0s", "--status", "cancelled", "--status", "dead").out == "deleted 0 runs\n"
    assert perdure("purge", "--older-than", "0s", "--workflow", "checkout").out == "deleted 0 runs\n"
    assert perdure("purge", "--older-than", "0s", "--json").document == {"deleted": 1}
    assert {line["id"] for line in perdure("runs", "--json").documents} == {"order-1", "later"}


@pytest.mark.usefixtures("started")
def test_an_exported_run_goes_on_where_it_is_imported(perdure: Command, sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    assert perdure("export", "order-1", "--output", "run.json").code == 0
    assert perdure("export", "order-1", "--json").document == json.loads(Path("run.json").read_text())
    again = perdure("import", "run.json")
    assert (again.code, again.out) == (1, "")
    assert "--replace" in again.err
    assert perdure("import", "run.json", "--replace").out == "imported run 'order-1'\n"
    assert perdure("import", "run.json", "--id", "order-2", "--json").document == {"id": "order-2"}
    monkeypatch.setenv("PERDURE_STORE", "sqlite:///other.db")
    assert perdure("import", "run.json").code == 0
    perdure("signal", "order-1", "approve", "--payload", '"yes"')
    sweep()
    assert perdure("show", "order-1", "--json").document["value"] == "o paid 500 yes"


@pytest.mark.usefixtures("started")
def test_migrate_copies_and_reports_what_it_left_out(perdure: Command) -> None:
    done = perdure("migrate", "sqlite:///app.db", "sqlite:///new.db", "--batch", "2")
    assert done == (0, "copied 3, already there 0, left out 0\n", "")
    assert perdure("migrate", "sqlite:///app.db", "sqlite:///new.db", "--json").document == {
        "copied": 0,
        "already_there": 3,
        "skipped": [],
    }
    perdure("delete", "order-1", "--yes", "--store", "sqlite:///new.db")
    asyncio.run(_put_run("sqlite:///new.db", "order-1"))
    left_out = perdure("migrate", "sqlite:///app.db", "sqlite:///new.db")
    assert left_out.code == 1
    assert "left out run order-1: another run has this id in the target\n" in left_out.out
    assert perdure("migrate", "sqlite:///none.db", "sqlite:///new.db").code == 1
    assert not Path("none.db").exists()


async def _put_run(dsn: str, run_id: str) -> None:
    store = open_store(dsn)
    await store.create(NewRun(id=run_id, workflow="other", input=b"[[],{}]", input_hash=b"1", seed=b"2"))
    await store.close()


def test_schedules(perdure: Command, sweep: Sweep) -> None:
    sweep()
    assert perdure("schedules").out == "no schedules\n"
    asyncio.run(_put_schedules())
    lines = {line["id"]: line for line in perdure("schedules", "--json").documents}
    assert (lines["nightly"]["cron"], lines["nightly"]["tz"], lines["often"]["every"]) == ("0 3 * * *", "Europe/Berlin", 300.0)
    shown = perdure("schedules").out
    assert "0 3 * * * Europe/Berlin" in shown
    assert "every 5 min " in shown
    assert perdure("schedules", "hold", "nightly", "--json").document == {"id": "nightly", "held": True}
    assert "on hold" in perdure("schedules").out
    assert perdure("schedules", "unhold", "nightly").out == "schedule 'nightly' is not on hold\n"
    started = perdure("schedules", "run", "often", "--app", "app:runtime", "--json").document
    assert started["id"].startswith("often:")
    assert perdure("show", started["id"], "--json").document["workflow"] == "broken"
    assert perdure("schedules", "drop", "often", "--json").document == {"id": "often", "dropped": True}
    assert perdure("schedules", "drop", "often").code == 1
    assert perdure("schedules", "hold", "often").code == 1
    assert perdure("schedules", "run", "nightly").code == 2


def test_queues(perdure: Command, sweep: Sweep) -> None:
    sweep()
    assert perdure("queues") == (0, "no queue has limits\n", "")
    assert perdure("queues", "--json") == (0, "", "")
    assert perdure("queues", "set", "mail", "--concurrency", "5", "--rate", "600/h").out == "queue 'mail': 5 at once, 600/h\n"
    assert perdure("queues", "set", "api", "--per-key", "2", "--json").document == {
        "name": "api",
        "concurrency": None,
        "per_key": 2,
        "rate": None,
    }
    assert [line["name"] for line in perdure("queues", "--json").documents] == ["api", "mail"]
    assert "mail   5        -        10/m" in perdure("queues").out
    assert perdure("queues", "set", "mail").out == "queue 'mail': no limits\n"
    assert "mail" not in perdure("queues").out


async def _put_schedules() -> None:
    import app  # type: ignore[import-not-found]  # the program that the fixture wrote

    runtime: Runtime = app.runtime
    await runtime.schedule("checkout", "o", cron="0 3 * * *", tz="Europe/Berlin", id="nightly")
    await runtime.schedule("broken", every="5m", id="often")
    await runtime.close()


@pytest.mark.usefixtures("started")
def test_check_exits_with_one_when_a_run_would_stop(perdure: Command, directory: Path) -> None:
    fits = perdure("check", "app:runtime")
    assert fits == (0, "checked 2: fits 2, stops 0, unknown 0, warns 0\n", "")
    program = directory / "app.py"
    program.write_text(program.read_text().replace("ctx.step(charge, cents)", "ctx.step(charge, cents, key='debit')"))
    stops = perdure("check", "app:runtime", "--json")
    assert stops.code == 1
    assert stops.document["fits"] is False
    assert {each["run_id"]: each["verdict"] for each in stops.document["runs"]} == {"order-1": "stops", "later": "fits"}
    assert "order-1" in perdure("check", "app:runtime", "--workflow", "checkout").out
    assert perdure("check", "app:runtime", "--workflow", "retried").code == 0


@pytest.mark.usefixtures("started")
def test_doctor_tells_the_settings_of_the_store(perdure: Command) -> None:
    found = perdure("doctor", "--json").document
    assert (found["store"], found["durability"], found["schema_version"]) == ("sqlite", "disk", VERSION)
    assert "shared" in found["capabilities"]
    assert found["clock_ahead_seconds"] == 0
    shown = perdure("doctor", "--store", "sqlite:///app.db?synchronous=normal").out
    assert "durability      process: an acknowledged write survives the end of the process" in shown


@pytest.mark.usefixtures("started")
def test_workers_that_were_killed_are_silent(perdure: Command) -> None:
    assert perdure("workers").out == "no workers\n"
    asyncio.run(_put_worker("sqlite:///app.db"))
    (line,) = perdure("workers", "--json").documents
    assert (line["name"], line["is_silent"], line["driven"], line["workflows"]) == ("h/7", True, 3, [["checkout", 2]])
    assert line["is_gone"] is False
    assert "h/7     silent  2001-09-09 01:46:40" in perdure("workers").out


async def _put_worker(dsn: str) -> None:
    said = {"name": "h/7", "host": "h", "pid": 7, "started_at": 0, "pause": 10, "concurrency": 5, "driven": 3}
    store = require(open_store(dsn), "operators")
    await store.put_worker("w", json.dumps({**said, "workflows": [["checkout", 2]]}).encode(), now=10**15)
    await store.close()


def test_on_postgresql(perdure: Command, sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    with on_postgres() as dsn:
        monkeypatch.setenv("PERDURE_STORE", dsn)
        missing = perdure("runs")
        assert missing.code == 1
        assert "there are no 'perdure' tables" in missing.err
        assert perdure("start", "app:runtime", "checkout", "--input", '"o"', "--id", "order-1").code == 0
        sweep()
        assert perdure("show", "order-1", "--json").document["status"] == "suspended"
        assert perdure("signal", "order-1", "approve").code == 0
        sweep()
        assert perdure("runs", "--status", "completed", "--json").documents[0]["id"] == "order-1"
        doctor = perdure("doctor", "--json").document
        assert (doctor["store"], doctor["durability"], doctor["schema_version"]) == ("postgresql", "disk", VERSION)
        assert perdure("migrate", dsn, "sqlite:///copy.db").out == "copied 1, already there 0, left out 0\n"
        assert perdure("purge", "--older-than", "0s", "--json").document == {"deleted": 1}


def test_approvals_are_listed_and_decided_once(perdure: Command, sweep: Sweep) -> None:
    perdure("start", "app:runtime", "checkout", "--input", '"o"', "--id", "other")
    sweep()
    assert perdure("approvals") == (0, "no approvals\n", "")
    for order in ("one", "two"):
        perdure("start", "app:runtime", "refund", "--input", f'"{order}"', "--id", order)
    sweep()
    (line,) = perdure("approvals", "--json", "--prefix", "one", "--assignee", "ada").documents
    assert (line["run_id"], line["name"], line["payload"]) == ("one", "refund", {"order": "one"})
    assert perdure("approvals", "--json", "--assignee", "eve").documents == []
    assert "b\\x1b[31mob" in perdure("approvals").out, "and no escape sequence for the terminal"
    assert perdure("approvals", "--limit", "1").err == "perdure: 1 approval at most is shown; --limit shows more\n"
    assert perdure("approvals", "--status", "running").code == 2
    assert perdure("approve", "one", "refund", "--by", "ada", "--payload", "[]").code == 1
    assert perdure("approve", "one", "refund", "--by", "ada", "--payload", "{").code == 2
    assert perdure("approve", "one", "refund", "--by", "eve").code == 1
    approved = perdure("approve", "one", "refund", "--by", "ada", "--payload", '{"order": "half"}')
    assert approved == (0, "approved 'refund' of run 'one'\n", "")
    again = perdure("reject", "one", "refund", "--by", "ada")
    assert again.code == 1
    assert "was approved by 'ada'" in again.err
    assert perdure("reject", "two", "other", "--by", "ada").code == 1
    rejected = perdure("reject", "two", "refund", "--by", "ada", "--key", "approve:refund", "--reason", "no", "--json").document
    assert rejected == {"id": "two", "approval": "refund", "decision": "rejected", "by": "ada"}
    sweep()
    assert "'order': 'half'" in perdure("show", "one", "--json").document["value"]
    assert "Rejected(reason='no', by='ada'" in perdure("show", "two", "--json").document["value"]

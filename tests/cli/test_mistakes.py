"""Every mistake has an exit code and a message of one or two lines on stderr, without traceback and without secrets."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Command, Sweep

USAGE = [
    (["bla"], 'Unknown command "bla"'),
    (["runs", "--bla"], "Unknown option: --bla"),
    (["runs", "--status", "odd"], 'Invalid value "odd" for --status'),
    (["runs", "--since", "yesterday"], "--since 'yesterday' must be how long ago, such as 1h30m or 2d, or a time"),
    (["runs", "--metadata", "customer"], "--metadata 'customer' must be key=value"),
    (["runs", "--limit", "0"], "limit must be a whole number of at least 1"),
    (["runs", "--stuck", "--limit", "0"], "limit must be a whole number of at least 1"),
    (["runs", "--limit", "many"], 'unable to convert "many" into int'),
    (["--store", "sqlite:///app.db", "runs"], "the command comes first, then its options: perdure COMMAND --store ..."),
    (["runs", "order-1"], "too many arguments: order-1"),
    (["runs", "--store", ""], "--store is empty"),
    (["runs", "--store", "nosuch:thing"], "no store for a DSN that begins with 'nosuch:'"),
    (["runs", "--store", "files:runs"], "to store runs write sqlite:///runs.db"),
    (["migrate", "files:runs", "sqlite:///app.db"], "files: names a key-value store"),
    (["runs", "--watch"], "use --watch --json for lines"),
    (["show"], "RUN_ID requires an argument"),
    (["show", ""], "a run's id"),
    (["signal", "order-1", "approve", "--payload", "yes"], "--payload is not JSON"),
    (["start", "app", "checkout"], "'app' must be module:name"),
    (["start", "app:runtime", "checkout", "--input", "{"], "--input is not JSON"),
    (["fork", "order-1"], "--from requires an argument"),
    (["delete", "order-1"], "pass --yes"),
    (["cancel", "--prefix", "order"], "pass --yes"),
    (["cancel"], "which runs? Give an id, or filters such as --status failed --workflow checkout, or --all"),
    (["delete", "--yes"], "which runs?"),
    (["hold", "order-1", "--status", "pending"], "an id and filters do not go together"),
    (["retry", "--all", "--status", "failed", "--yes"], "leave it out, or the filter"),
    (["purge", "--older-than", "1d", "--status", "running"], 'Invalid value "running" for --status'),
    (["purge"], "--older-than requires an argument"),
    (["purge", "--older-than", "banana"], "'banana' is not a length of time"),
    (["migrate", "sqlite:///app.db", "sqlite:///app.db"], "source and target are the same store"),
    (["schedules", "run", "nightly"], "--app requires an argument"),
    (["queues", "set"], "requires an argument"),
    (["queues", "set", "mail", "--rate", "fast"], "must be a whole number per second, minute, hour or day"),
    (["queues", "set", "mail", "--concurrency", "0"], "concurrency must be a whole number of at least 1"),
    (["import", "anonymous.json"], "pass --id"),
]
FAILURES = [
    (["show", "nope"], "there is no run 'nope'"),
    (["export", "nope"], "there is no run 'nope'"),
    (["signal", "nope", "approve"], "there is no run 'nope'"),
    (["cancel", "nope"], "there is no run 'nope'"),
    (["retry", "nope"], "there is no run 'nope'"),
    (["fork", "nope", "--from", "charge"], "there is no run 'nope'"),
    (["fork", "order-1", "--from", "charge"], "run 'order-1' has recorded no step 'charge'; it has recorded nothing so far"),
    (["hold", "nope"], "there is no run 'nope'"),
    (["unhold", "nope"], "there is no run 'nope'"),
    (["delete", "nope", "--yes"], "there is no run 'nope'"),
    (["retry", "order-1"], "it is pending"),
    (
        ["start", "app:runtime", "nosuch"],
        "workflow 'nosuch' is not registered here (registered: broken, checkout, refund, retried)",
    ),
    (["start", "app:runtime", "checkout"], "missing a required argument: 'order'"),
    (["start", "nosuch:runtime", "checkout"], "there is no module 'nosuch'"),
    (["start", "app:nothing", "checkout"], "app has no 'nothing'"),
    (["start", "app:charge", "checkout"], "app:charge is of type function, and must be a Runtime"),
    (["start", "faulty:runtime", "checkout"], "importing faulty failed: ZeroDivisionError: division by zero"),
    (["start", "in_memory:runtime", "checkout"], "the run would be lost; give it a shared one"),
    (["worker", "in_memory:runtime"], "it would find no runs"),
    (["schedules", "hold", "nope"], "there is no schedule 'nope'"),
    (["schedules", "drop", "nope"], "there is no schedule 'nope'"),
    (["runs", "--store", "sqlite:///none.db"], "there is no such file"),
    (["import", "nofile"], "No such file or directory: 'nofile'"),
    (["import", "app.py"], "app.py is no snapshot"),
]


@pytest.fixture
def _prepared(perdure: Command, directory: Path) -> None:
    (directory / "faulty.py").write_text("1 / 0\n")
    (directory / "in_memory.py").write_text("from perdure import Runtime, stores\nruntime = Runtime(stores.memory())\n")
    (directory / "anonymous.json").write_text('{"formatVersion": 1, "steps": {}}')
    perdure("start", "app:runtime", "checkout", "--input", '"o"', "--id", "order-1")


@pytest.mark.usefixtures("_prepared")
@pytest.mark.parametrize(
    ("code", "arguments", "message"),
    [(2, *each) for each in USAGE] + [(1, *each) for each in FAILURES],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_explained(perdure: Command, code: int, arguments: list[str], message: str) -> None:
    done = perdure(*arguments, *(["--json"] if "--watch" not in arguments else ()))
    assert (done.code, done.out) == (code, "")
    assert message in done.err
    assert done.err.startswith("perdure: ")
    assert 1 <= done.err.count("\n") <= 2
    assert "Traceback" not in done.err


def test_no_command_leaves_a_store_behind(perdure: Command, directory: Path) -> None:
    for arguments in (["runs"], ["show", "x"], ["cancel", "x"], ["purge", "--older-than", "1d"], ["schedules"], ["doctor"]):
        assert perdure(*arguments).code == 1
    assert not (directory / "app.db").exists()


def test_an_invalid_snapshot_is_refused_with_what_is_wrong(perdure: Command, directory: Path) -> None:
    (directory / "bad.json").write_text('{"formatVersion": 1, "steps": {"a": 1}, "execution": {}}')
    done = perdure("import", "bad.json", "--id", "x")
    assert (done.code, done.out) == (1, "")
    assert "$.steps.a" in done.err


def test_a_dsn_in_the_wrong_place_is_repeated_without_its_password(perdure: Command) -> None:
    done = perdure("runs", "postgresql://ada:se@cret@host/db")
    assert done.code == 2
    assert "postgresql://ada:***@host/db" in done.err


def test_a_server_that_is_away_is_named_without_the_password(perdure: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.backends.base.connections.ServerConnections.PATIENCE", 0.0)
    done = perdure("runs", "--store", "postgresql://ada:secret@127.0.0.1:1/db?sslmode=disable")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("perdure: PostgreSQL store 127.0.0.1:1/db: ConnectionRefusedError")
    assert "secret" not in done.err


def test_a_command_says_that_it_waits_for_its_store(perdure: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.cli.options.NOTICE_AFTER", 0.1)
    monkeypatch.setattr("perdure.backends.base.connections.ServerConnections.PATIENCE", 1.0)
    done = perdure("runs", "--store", "postgresql://ada:secret@127.0.0.1:1/db?sslmode=disable")
    waiting, failed = done.err.splitlines()
    assert (done.code, done.out, waiting) == (1, "", "perdure: the store has not answered yet; waiting (Ctrl-C ends this)")
    assert "ConnectionRefusedError" in failed


def test_the_store_comes_from_the_option_then_the_environment_then_pyproject(
    perdure: Command, sweep: Sweep, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep()
    below = directory / "below"
    below.mkdir()
    pyproject = directory / "pyproject.toml"
    pyproject.write_text(f'[tool.perdure]\nstore = "sqlite:///{directory}/app.db"\n')
    assert perdure("runs", "--store", "sqlite:///none.db").code == 1
    monkeypatch.setenv("PERDURE_STORE", "sqlite:///none.db")
    assert perdure("runs").code == 1
    monkeypatch.delenv("PERDURE_STORE")
    monkeypatch.chdir(below)
    assert perdure("runs").code == 0
    for text, message in (
        ("[tool]\n", "which store?"),
        ("[tool.perdure]\nstore = 1\n", "must be a DSN"),
        ("=\n", "cannot be read"),
    ):
        pyproject.write_text(text)
        done = perdure("runs")
        assert (done.code, done.out) == (2, "")
        assert message in done.err

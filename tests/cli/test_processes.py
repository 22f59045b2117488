"""The command as a process: its entry points, signals, pipes, and what it says without its extra."""

from __future__ import annotations

import importlib.metadata
import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import pytest

from perdure.cli import main
from tests.cli.conftest import Command, Sweep

PERDURE: Final = (sys.executable, "-m", "perdure")


def test_the_installed_command_is_main() -> None:
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"perdure": f"{main.__module__}:{main.__name__}"}
    assert {each.partition(">")[0] for each in project["optional-dependencies"]["cli"]} == {"cyclopts", "rich"}


def test_python_m_perdure_is_the_command(perdure: Command, directory: Path) -> None:
    perdure("start", "app:runtime", "checkout", "--input", '"o"', "--id", "order-1")
    done = subprocess.run([*PERDURE, "runs", "--json"], cwd=directory, capture_output=True, text=True, check=True)
    assert (json.loads(done.stdout)["id"], done.stderr) == ("order-1", "")
    asked = subprocess.run([*PERDURE, "--version"], capture_output=True, text=True, check=True)
    assert asked.stdout == f"{importlib.metadata.version('perdure')}\n"
    failed = subprocess.run([*PERDURE, "show", "nope"], cwd=directory, capture_output=True, text=True, check=False)
    assert (failed.returncode, failed.stdout) == (1, "")


def test_without_the_extra_it_says_what_to_install(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("perdure.cli.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cyclopts", None)
    assert main(["runs"]) == 1
    assert capsys.readouterr().err == "perdure: the command line needs cyclopts and rich: pip install 'perdure[cli]'\n"


def test_ctrl_c_ends_a_watch_quietly(perdure: Command, directory: Path) -> None:
    perdure("start", "app:runtime", "checkout", "--input", '"o"', "--id", "order-1")
    command = [*PERDURE, "runs", "--watch", "--json"]
    with subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        assert json.loads(watching.stdout.readline())["status"] == "pending"
        perdure("start", "app:runtime", "broken", "--id", "second")
        assert json.loads(watching.stdout.readline())["id"] == "second"
        watching.send_signal(signal.SIGINT)
        out, err = watching.communicate(timeout=30)
    assert (watching.returncode, out, err) == (130, "", "")


def test_a_watch_draws_on_a_terminal(perdure: Command, sweep: Sweep, directory: Path) -> None:
    sweep()
    ours, theirs = pty.openpty()
    with subprocess.Popen([*PERDURE, "runs", "--watch"], cwd=directory, stdout=theirs, stderr=subprocess.PIPE) as watching:
        os.close(theirs)
        _read_until(ours, b"detail")  # the heads of the columns, though there is no run
        perdure("start", "app:runtime", "checkout", "--input", '"o"', "--id", "order-1")
        _read_until(ours, b"order-1")
        watching.send_signal(signal.SIGINT)
        assert watching.communicate(timeout=30)[1] == b""
    os.close(ours)
    assert watching.returncode == 130


@pytest.mark.parametrize(("environment", "is_plain"), [({}, False), ({"NO_COLOR": "1"}, True), ({"TERM": "dumb"}, True)])
def test_colours_are_for_terminals_that_want_them(
    perdure: Command, directory: Path, environment: dict[str, str], is_plain: bool
) -> None:
    perdure("start", "app:runtime", "checkout", "--input", '"o"', "--id", "order-1")
    ours, theirs = pty.openpty()
    terminal = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"TERM": "xterm"} | environment
    subprocess.run([*PERDURE, "runs"], cwd=directory, env=terminal, stdout=theirs, check=True)
    os.close(theirs)
    shown = os.read(ours, 4096)
    os.close(ours)
    assert b"order-1" in shown
    assert (b"\x1b" not in shown) is is_plain


def _read_until(terminal: int, text: bytes) -> None:
    found = b""
    while text not in found:
        found += os.read(terminal, 4096)


def test_a_reader_that_leaves_is_no_error(perdure: Command, directory: Path) -> None:
    perdure("start", "app:runtime", "checkout", "--input", '"o"', "--id", "order-1")
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([*PERDURE, "runs"], cwd=directory, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_drives_runs_until_a_signal_and_logs_json(perdure: Command, directory: Path, number: signal.Signals) -> None:
    perdure("start", "app:runtime", "broken", "--id", "bad")
    command = [*PERDURE, "worker", "app:runtime", "--json"]
    with subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as working:
        until = time.monotonic() + 30
        while perdure("show", "bad", "--json").document["status"] != "failed":
            assert time.monotonic() < until
            time.sleep(0.05)
        working.send_signal(number)
        out, err = working.communicate(timeout=30)
    assert (working.returncode, err) == (0, "")
    lines = [json.loads(line) for line in out.splitlines()]
    (failed,) = [line for line in lines if line["level"] == "WARNING"]
    assert (failed["logger"], "bad" in failed["message"]) == ("perdure", True)
    assert failed["traceback"].startswith("perdure.errors.StepTraceback: \nTraceback (most recent call last):\n")

"""The transcripts of docs/command-line.md are what the commands print, on SQLite and on PostgreSQL.

Instants, lengths of time, directories and the store's name are not compared, nor is how much space is between words. A line `...`
stands for any number of lines.
"""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from tests.backends.places import on_postgres, on_sqlite
from tests.cli.conftest import Command

PAGE: Final = Path(__file__).parents[2] / "docs" / "command-line.md"
CONSOLE: Final = re.compile(r"^```console\n(.*?)^```", re.DOTALL | re.MULTILINE)
MASKS: Final = (
    (re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(\.\d+)?Z?"), "INSTANT"),
    (re.compile(r"\b\d+(\.\d+)? m?s\b"), "LENGTH"),
    (re.compile(r"^store .*", re.MULTILINE), "STORE"),
    (re.compile(r"^perdure +\S+ on Python .*", re.MULTILINE), "VERSIONS"),
    (re.compile(r'File "[^"]*/'), 'File "'),
    (re.compile(r" +"), " "),
)


class Said(NamedTuple):
    """A command of the page, and what stands below it."""

    command: str
    shown: str


def transcript() -> list[Said]:
    """All commands of the page, in order."""
    blocks = CONSOLE.findall(PAGE.read_text())
    said = [part.partition("\n") for block in blocks for part in ("\n" + block).split("\n$ ")[1:]]
    return [Said(command, shown.rstrip("\n")) for command, _, shown in said]


class Session:
    """A shell that knows only what the page uses."""

    def __init__(self, perdure: Command, environment: pytest.MonkeyPatch, dsn: str) -> None:
        self._perdure = perdure
        self._environment = environment
        self._dsn = dsn
        self._code = 0

    def run(self, command: str) -> str:
        """What the command prints."""
        words = [self._dsn if word == "$PERDURE_STORE" else word for word in shlex.split(command)]
        match words:
            case ["export", _]:
                self._environment.setenv("PERDURE_STORE", self._dsn)
                return ""
            case ["echo", "$?"]:
                return str(self._code)
            case ["python", program]:
                subprocess.run([sys.executable, program], check=True)
                return ""
            case ["perdure", "worker", *_]:
                return self._work(words[1:])
            case ["perdure", *arguments]:
                done = self._perdure(*arguments)
                self._code = done.code
                return (done.out + done.err).rstrip("\n")
        raise AssertionError(f"the page has a command that is not known here: {command}")

    def _work(self, arguments: list[str]) -> str:
        """Let a worker drive what is due, and end it as Ctrl-C does."""
        with subprocess.Popen([sys.executable, "-m", "perdure", *arguments], stderr=subprocess.PIPE, text=True) as worker:
            until = time.monotonic() + 30
            while not self._is_idle():
                assert time.monotonic() < until
                time.sleep(0.2)
            worker.send_signal(signal.SIGINT)
            log = worker.communicate(timeout=30)[1]
        self._code = worker.returncode
        return f"{log}^C"

    def _is_idle(self) -> bool:
        open_runs = [self._perdure("show", line["id"], "--json").document for line in self._perdure("runs", "--json").documents]
        return all(run["status"] in ("completed", "failed") or _waits(run) for run in open_runs)


def _waits(run: dict[str, str]) -> bool:
    return run["status"] == "suspended" and datetime.fromisoformat(run["wake_at"]) > datetime.now(UTC)


def is_as_shown(printed: str, shown: str) -> bool:
    """Whether this was printed."""
    for pattern, mask in MASKS:
        printed, shown = pattern.sub(mask, printed), pattern.sub(mask, shown)
    wanted = re.escape(shown + "\n").replace(re.escape("...\n"), r"(?:.*\n)*?")
    return re.fullmatch(wanted, printed + "\n") is not None


@pytest.mark.parametrize("place", [on_sqlite, on_postgres])
def test_the_page_shows_what_the_commands_print(
    perdure: Command, directory: Path, monkeypatch: pytest.MonkeyPatch, place: Callable[[], AbstractContextManager[str]]
) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (directory / "app.py").write_text(program)
    with place() as dsn:
        session = Session(perdure, monkeypatch, dsn)
        for said in transcript():
            printed = session.run(said.command)
            shown = said.shown
            if said.command == "perdure runs":  # runs that changed at the same time come in any order
                printed, shown = ("\n".join(sorted(text.splitlines())) for text in (printed, shown))
            assert is_as_shown(printed, shown), f"$ {said.command}\n{printed}"


def test_the_page_shows_every_command(perdure: Command) -> None:
    listed = re.findall(r"^│ (\w+) ", perdure("--help").out, re.MULTILINE)
    used = {said.command.split()[1] for said in transcript() if said.command.startswith("perdure ")}
    assert used == set(listed)


@pytest.mark.parametrize(
    ("printed", "shown", "is_same"),
    [
        ("a 2026-01-01 00:00:00  b", "a 2030-12-31 23:59:59 b", True),
        ("took 12 ms", "took 1.5 s", True),
        ("one\ntwo\nthree", "one\n...\nthree", True),
        ("", "...", True),
        ("one\ntwo", "one", False),
        ("one", "two", False),
    ],
)
def test_what_is_compared(printed: str, shown: str, is_same: bool) -> None:
    assert is_as_shown(printed, shown) is is_same

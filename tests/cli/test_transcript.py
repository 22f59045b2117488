"""The transcripts of docs/command-line.md are what the commands print, on SQLite and on PostgreSQL."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.backends.places import on_postgres, on_sqlite
from tests.cli.conftest import Command
from tests.cli.transcript import PAGE, Said, Session, for_readers, is_as_shown, is_one_recording, program, rewrite, transcript


@pytest.mark.parametrize("place", [on_sqlite, on_postgres])
def test_the_page_shows_what_the_commands_print(
    perdure: Command, directory: Path, place: Callable[[], AbstractContextManager[str]]
) -> None:
    (directory / "app.py").write_text(program())
    with place() as dsn:
        session = Session(perdure, os.environ, dsn)  # what it exports is undone with `directory`
        for said in transcript():
            printed = session.run(said.command)
            assert is_as_shown(said, printed), f"make pages writes it anew\n$ {said.command}\n{printed}"


def test_the_page_shows_every_command(perdure: Command) -> None:
    words = [said.command.split() for said in transcript() if said.command.startswith("perdure ")]
    groups = {command for command in _commands(perdure) if _commands(perdure, command)}
    assert {each[1] for each in words} == set(_commands(perdure))
    for group in groups:
        assert {each[2] for each in words if each[1] == group and len(each) > 2} == set(_commands(perdure, group))


def _commands(perdure: Command, *group: str) -> list[str]:
    """The commands that the help lists."""
    panel = perdure(*group, "--help").out.partition("─ Commands ─")[2].partition("╰")[0]
    return re.findall(r"^│ ([a-z]\w*) ", panel, re.MULTILINE)


def test_every_command_prints_json_if_asked(perdure: Command) -> None:
    for command in _commands(perdure):
        for line in ([command], *([command, each] for each in _commands(perdure, command))):
            assert "--json" in perdure(*line, "--help").out, line


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
    assert is_as_shown(Said("perdure show x", shown), printed) is is_same


def test_a_page_is_written_anew_as_one_recording_if_anything_differs() -> None:
    page = "# A page\n\n```console\n$ old\nat 2030-12-31 23:59:59\n$ new\n$ silent\n```\n\nThe end.\n"
    printed = {"old": "at 2026-01-01 00:00:00", "new": "in /scratch/app.db", "silent": ""}
    written = rewrite(page, printed.__getitem__, "/scratch")
    assert written == page.replace("2030-12-31 23:59:59", "2026-01-01 00:00:00").replace("$ new\n", "$ new\nin /srv/app.db\n")
    later = {**printed, "old": "at 2027-01-01 00:00:00", "new": "in /srv/app.db"}
    assert rewrite(written, later.__getitem__, "/scratch") == written


def test_a_page_of_two_recordings_is_written_anew() -> None:
    page = "```console\n$ a\nat 2026-01-01 00:00:00\n$ b\nuntil 2026-01-04 {}\n```\n"
    printed = {"a": "at 2030-01-01 00:00:00", "b": "until 2030-01-04 00:00:04"}
    assert rewrite(page.format("00:04:59"), printed.__getitem__, "/scratch") == page.format("00:04:59")
    assert rewrite(page.format("08:00:00"), printed.__getitem__, "/scratch").count("2030") == 2


def test_the_page_is_one_recording() -> None:
    assert is_one_recording(PAGE.read_text(encoding="utf-8"))


def test_readers_see_the_frames_of_the_program_only() -> None:
    ours = '    File "{}/app.py", line 12, in ship\n      raise ValueError("no")\n  ValueError: no'
    theirs = '    File "/usr/lib/steps.py", line 1, in run\n      await call()\n            ^^^^^^\n'
    assert for_readers("perdure show x", theirs + theirs + ours.format("/scratch"), "/scratch") == "...\n" + ours.format("/srv")
    assert for_readers("perdure worker app:runtime", "a log^C", "/scratch") == "...\n^C"
    assert for_readers("perdure workers", "no workers", "/scratch") == "no workers"

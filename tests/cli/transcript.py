"""The transcripts of docs/command-line.md: read, run, compared, and written by `python -m tests.cli.transcript` (`make pages`).

To show another command, write it into a block of the page as `$ perdure ...`, and let `make pages` write what it prints. A line
`...` on the page stands for any number of lines. The page stays as it is while it is one recording and all of it fits what is
printed. Otherwise all of it is recorded anew.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, MutableMapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from perdure.model.records import ENDED
from tests.cli.conftest import Done

PAGE: Final = Path(__file__).parents[2] / "docs" / "command-line.md"
PROGRAM: Final = re.compile(r"```python\n(.*?)```", re.DOTALL)
CONSOLE: Final = re.compile(r"^```console\n(.*?)^```", re.DOTALL | re.MULTILINE)
_INSTANT: Final = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d")
# What differs each time: instants, lengths of time, where the store is, versions, directories, and space between words.
MASKS: Final = (
    (re.compile(_INSTANT.pattern + r"(\.\d+)?Z?"), "INSTANT"),
    (re.compile(r"\b\d+(\.\d+)? m?s\b"), "LENGTH"),
    (re.compile(r"^store .*", re.MULTILINE), "STORE"),
    (re.compile(r"^perdure +\S+ on Python .*", re.MULTILINE), "VERSIONS"),
    (re.compile(r'File "[^"]*/'), 'File "'),
    (re.compile(r" +"), " "),
    (re.compile(r"\{[^{…\n]*…"), "{…"),  # where a value is cut depends on how wide the other columns are
)
# Of the frames of a traceback only those of the program are shown.
_FOREIGN_FRAMES: Final = re.compile(r'(?:^ +File "(?!/srv/).*\n(?:^ {4,}(?! |File ").*\n)*)+', re.MULTILINE)

RunCommand: TypeAlias = Callable[..., Done]


class Said(NamedTuple):
    """A command of the page, and what stands below it."""

    command: str
    shown: str


def program() -> str:
    """The program of the page."""
    (found,) = PROGRAM.findall(PAGE.read_text(encoding="utf-8"))
    return str(found)


def transcript() -> list[Said]:
    """All commands of the page, in order."""
    return [said for block in CONSOLE.findall(PAGE.read_text(encoding="utf-8")) for said in _said(block)]


def _said(block: str) -> list[Said]:
    parts = (part.partition("\n") for part in ("\n" + block).split("\n$ ")[1:])
    return [Said(command, shown.rstrip("\n")) for command, _, shown in parts]


class Session:
    """A shell that knows only what the page uses. It works in the current directory."""

    def __init__(self, perdure: RunCommand, environment: MutableMapping[str, str], dsn: str) -> None:
        self._perdure = perdure
        self._environment = environment
        self._dsn = dsn
        self._code = 0

    def run(self, command: str) -> str:
        """What the command prints."""
        words = [self._dsn if word == "$PERDURE_STORE" else word for word in shlex.split(command)]
        match words:
            case ["export", _]:
                self._environment["PERDURE_STORE"] = self._dsn
                return ""
            case ["echo", "$?"]:
                return str(self._code)
            case ["python", file]:
                subprocess.run([sys.executable, file], check=True)
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
        return all(run["status"] in ENDED or run["held"] or _waits(run) for run in open_runs)


def _waits(run: dict[str, str]) -> bool:
    return run["status"] == "suspended" and datetime.fromisoformat(run["wake_at"]) > datetime.now(UTC)


def is_as_shown(said: Said, printed: str) -> bool:
    """Whether what was printed is what the page shows."""
    shown = said.shown
    for pattern, mask in MASKS:
        printed, shown = pattern.sub(mask, printed), pattern.sub(mask, shown)
    if said.command == "perdure runs":  # runs that changed at the same time come in any order
        printed, shown = ("\n".join(sorted(text.splitlines())) for text in (printed, shown))
    wanted = re.escape(shown + "\n").replace(re.escape("...\n"), r"(?:.*\n)*?")
    return re.fullmatch(wanted, printed + "\n") is not None


def is_one_recording(page: str) -> bool:
    """Return whether the instants on the page are of the same minutes, or whole days later, as its deadlines are."""
    instants = [datetime.fromisoformat(found) for found in _INSTANT.findall(page)]
    return all((at - min(instants)) % timedelta(days=1) < timedelta(minutes=5) for at in instants)


def rewrite(page: str, run: Callable[[str], str], directory: str) -> str:
    """Run the commands. Return the page as it is if it is one recording of what they print, otherwise a new recording."""
    commands = [said for block in CONSOLE.findall(page) for said in _said(block)]
    printed = [run(said.command) for said in commands]
    if is_one_recording(page) and all(map(is_as_shown, commands, printed)):
        return page
    recorded = iter(printed)

    def block(found: re.Match[str]) -> str:
        lines = []
        for said in _said(found[1]):
            shown = for_readers(said.command, next(recorded), directory)
            lines += [f"$ {said.command}", *([shown] if shown else [])]
        return "```console\n" + "\n".join(lines) + "\n```"

    return CONSOLE.sub(block, page)


def for_readers(command: str, printed: str, directory: str) -> str:
    """What was printed, without the directory of this machine, frames of other code, and the log of a worker."""
    if command.startswith("perdure worker "):
        return "...\n^C"
    text = printed.replace(directory, "/srv") + "\n"
    return _FOREIGN_FRAMES.sub("...\n", text).removesuffix("\n")


def main() -> None:
    """Run the commands of the page in a directory of their own, each as a process, and write the page."""

    def perdure(*arguments: str) -> Done:
        done = subprocess.run([sys.executable, "-m", "perdure", *arguments], capture_output=True, text=True, check=False)
        return Done(done.returncode, done.stdout, done.stderr)

    with tempfile.TemporaryDirectory() as directory:
        page, here = PAGE.read_text(encoding="utf-8"), Path.cwd()
        Path(directory, "app.py").write_text(program(), encoding="utf-8")
        os.environ["COLUMNS"] = "100"
        os.chdir(directory)
        try:
            written = rewrite(page, Session(perdure, os.environ, "sqlite:///app.db").run, directory)
        finally:
            os.chdir(here)
    PAGE.write_text(written, encoding="utf-8")


if __name__ == "__main__":
    main()

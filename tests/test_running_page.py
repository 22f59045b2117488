"""docs/running.md tells the truth: its settings are those of the code, and its unit for systemd starts and stops a worker.

Its commands for backups are tried in tests/backends/test_backups.py.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path
from typing import Final

import pytest

from perdure import runtime
from perdure.backends.mongo.connections import MongoConnections
from perdure.options import EngineSettings
from tests import settings_page

# The program of the unit: a runtime and a run, which is started when the module is imported.
APP: Final = """
from perdure import Context, Runtime, workflow

@workflow
async def greet(ctx: Context) -> str:
    return "hello"

with Runtime(concurrency=0).sync as client:
    client.start(greet, id="greeting-1")
runtime = Runtime(workflows=[greet])
"""
# For the worker to say goodbye and to close what it has opened.
MARGIN: Final = 5.0


def test_the_page_has_the_settings_of_the_code() -> None:
    written = settings_page.PAGE.read_text(encoding="utf-8")
    assert settings_page.with_settings(written) == written, "make pages writes them anew"


def test_the_defaults_that_no_signature_has_are_those_in_force() -> None:
    in_force, shown = runtime._settings({}), EngineSettings()
    for name in ("unload_grace", "max_attempts", "drain_after"):
        assert getattr(in_force, name) == getattr(shown, name)


@pytest.mark.parametrize(
    ("docstring", "meanings"),
    [
        ("What it is.\n\n    - `a`: one.\n    - `b`: two,\n      and more.\n    ", {"a": "one.", "b": "two, and more."}),
        ("- `a`: one.\n\nMore words.\n", {"a": "one."}),
        ("No option.", {}),
        (None, {}),
    ],
)
def test_meanings_are_lines_of_a_docstring(docstring: str | None, meanings: dict[str, str]) -> None:
    assert settings_page.meanings_in(docstring) == meanings


def test_an_option_without_a_meaning_is_named() -> None:
    with pytest.raises(LookupError, match="the docstring of Runtime does not say what odd= means"):
        settings_page._meaning("odd", "Runtime", {})


def unit_of_the_page(directory: Path) -> ConfigParser:
    """The unit of systemd, with its program, its code and its store in this directory."""
    (text,) = re.findall(r"```ini\n(.*?)```", settings_page.PAGE.read_text(encoding="utf-8"), re.DOTALL)
    text = text.replace("/srv/app/.venv/bin/perdure", str(Path(sys.executable).with_name("perdure")))
    text = text.replace("/srv/app", str(directory)).replace("postgresql://app@localhost/app", f"sqlite:///{directory}/app.db")
    (directory / "perdure.service").write_text(text)
    (directory / "app.py").write_text(APP)
    unit = ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]  # as the documentation of configparser has it
    unit.read_string(text)
    return unit


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("there is no systemd-analyze here")
    unit_of_the_page(tmp_path)
    found = subprocess.run([analyze, "verify", "perdure.service"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr) == (0, "")


def test_the_unit_of_systemd_drives_runs_and_ends_with_0(tmp_path: Path) -> None:
    service = unit_of_the_page(tmp_path)["Service"]
    settings = EngineSettings()
    assert int(service["TimeoutStopSec"]) >= settings.drain_after + MongoConnections.PATIENCE + MARGIN
    name, _, value = service["Environment"].partition("=")
    command, where = shlex.split(service["ExecStart"]), service["WorkingDirectory"]
    with subprocess.Popen(command, cwd=where, env={**os.environ, name: value}, stderr=subprocess.PIPE, text=True) as worker:
        assert worker.stderr is not None
        said = next(line for line in worker.stderr if "is completed" in line)
        worker.send_signal(signal.SIGTERM)
        rest = worker.stderr.read()
    assert "greeting-1" in said
    assert worker.returncode == 0, rest
    assert "Traceback" not in rest

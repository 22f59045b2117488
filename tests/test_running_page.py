"""docs/running.md tells the truth: its settings are those of the code, and its commands for PostgreSQL do what it says."""

from __future__ import annotations

import asyncio
import re
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest

from perdure import Context, Ok, Runtime, Suspended, runtime, workflow
from perdure.options import EngineSettings
from tests import settings_page
from tests.backends.places import new_name, run_on_postgres
from tests.servers import postgres


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


async def pay() -> str:
    return "paid"


@workflow
async def order(ctx: Context[Any]) -> str:
    paid = await ctx.step(pay)
    await ctx.wait_for_signal("delivered")
    return paid


def test_a_run_goes_on_from_a_dump_of_postgresql(tmp_path: Path) -> None:
    server = postgres.shared_server().dsn
    names = new_name(), new_name()
    source, target = (urlunsplit(urlsplit(server)._replace(path=f"/{name}")) for name in names)
    for name in names:
        run_on_postgres(server, f"CREATE DATABASE {name}")
    try:
        assert isinstance(asyncio.run(_drive(source)), Suspended)
        (commands,) = re.findall(r"```sh\n(pg_dump .*?)```", settings_page.PAGE.read_text(encoding="utf-8"), re.DOTALL)
        environment = {
            "SOURCE": source,
            "TARGET": target,
            "PATH": f"{Path(postgres.find_binary('pg_dump')).parent}:/usr/bin:/bin",
        }
        subprocess.run(["sh", "-ec", commands], cwd=tmp_path, env=environment, check=True)
        assert asyncio.run(_drive(target, "delivered")) == Ok("paid")
    finally:
        for name in names:
            run_on_postgres(server, f"DROP DATABASE {name} WITH (FORCE)")


async def _drive(dsn: str, *signals: str) -> Any:
    client = Runtime(dsn, [order], concurrency=0)
    try:
        for name in signals:
            await client.signal("order-1", name)
        return await client.run(order, id="order-1")
    finally:
        await client.close()

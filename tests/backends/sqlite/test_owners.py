from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from perdure.backends.sqlite import SQLiteStore
from perdure.errors import LeaseHeld
from perdure.model import process_owner as owner
from perdure.model.durations import MICROSECOND
from perdure.model.process_owner import Owner, Owners, current
from perdure.testing.contract.world import new_run
from tests.backends.disk_child import create_leased

linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="only Linux tells when a process began")


@pytest.fixture
def ended() -> Owner:
    """The owner text of a process that has ended and was collected."""
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()
    return current()._replace(pid=process.pid, start="1")


def gone(text: object) -> bool:
    return Owners().has_ended(str(text))


@linux
def test_an_owner_reads_back_as_it_was_written() -> None:
    here = current()
    assert Owner.parse(str(here)) == here
    assert here.pid == os.getpid()
    assert "-" not in (here.boot, here.namespaces, here.start)


@linux
def test_this_process_is_alive() -> None:
    assert not gone(current())
    assert Owners().here == str(current())


@linux
def test_a_process_that_has_ended_is_gone(ended: Owner) -> None:
    assert gone(ended)


@linux
def test_a_reused_process_id_is_another_process() -> None:
    assert gone(current()._replace(pid=os.getppid(), start="1"))


@linux
def test_a_process_of_another_boot_of_this_host_is_gone() -> None:
    assert gone(current()._replace(boot="an-earlier-one"))


@linux
@pytest.mark.parametrize(
    "part", [{"host": "another"}, {"namespaces": "pid:[1]"}, {"start": "-"}, {"namespaces": "-"}, {"boot": "-"}]
)
def test_what_cannot_be_looked_up_counts_as_alive(ended: Owner, part: dict[str, Any]) -> None:
    assert not gone(ended._replace(**part))


@pytest.mark.parametrize(
    "text", ["", "somebody", "a/b/c", "a/b/c/x/1", "a/b/c/-1/1", "a/b/c/99999999999999999999999/1", "h/b/n/1/2/3"]
)
def test_a_text_of_somebody_else_counts_as_alive(text: str) -> None:
    assert not gone(text)


@linux
@pytest.mark.parametrize("name", ["plain", "with space", "a) Z 1 (b", ")))", "1 (2) R 3"])
def test_a_process_may_have_any_name(name: str) -> None:
    program = f"import sys\nopen('/proc/self/comm', 'w').write({name!r})\nprint('ready', flush=True)\nsys.stdin.read()"
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    stat = owner._stat(process.pid)
    assert stat is not None
    alive = current()._replace(pid=process.pid, start=stat.start)
    assert not gone(alive)
    process.communicate("")
    assert gone(alive)


@linux
def test_a_process_that_nobody_collected_is_gone() -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    stat = owner._stat(process.pid)
    assert stat is not None
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert gone(current()._replace(pid=process.pid, start=stat.start))
    process.wait()


def test_a_hidden_process_counts_as_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    other = current()._replace(pid=os.getppid(), start="1")
    owners = Owners()
    assert owners.here
    monkeypatch.setattr(owner, "_PROC", "/nowhere")
    assert not owners.has_ended(str(other))


def test_without_proc_only_expiry_counts(monkeypatch: pytest.MonkeyPatch, ended: Owner) -> None:
    monkeypatch.setattr(owner, "_PROC", "/nowhere")
    here = current()
    assert (here.pid, here.start) == (os.getpid(), "-")
    assert not gone(ended)


def _forge(path: Path, text: str) -> None:
    database = sqlite3.connect(path)
    with database:
        database.execute("UPDATE perdure_runs SET lease_owner = ?", (text,))
    database.close()


@linux
async def test_a_lease_from_another_pid_namespace_ends_only_by_expiry(store: SQLiteStore, path: Path, ended: Owner) -> None:
    await create_leased(store, "run")
    await asyncio.to_thread(_forge, path, str(ended._replace(namespaces="pid:[1]")))
    row = await store.get("run")
    assert row is not None
    assert row.lease_until is not None
    assert (await store.claim(1, 60, [("flow", 1)])).claims == []
    with pytest.raises(LeaseHeld):
        await store.acquire("run", 60)
    claims = await store.claim(1, 60, [("flow", 1)], now=row.lease_until)
    assert [claim.run.id for claim in claims.claims] == ["run"]


@linux
async def test_what_the_dead_held_is_claimed_in_turn_and_counts_as_an_attempt(
    store: SQLiteStore, path: Path, ended: Owner
) -> None:
    lease = await create_leased(store, "dead")
    await asyncio.to_thread(_forge, path, str(ended))
    await store.create(new_run("waiting"))
    claims = (await store.claim(10, 60, [("flow", 1)])).claims
    assert [(claim.run.id, claim.run.attempts) for claim in claims] == [("waiting", 1), ("dead", 2)]
    assert claims[1].lease.epoch > lease.epoch


@linux
async def test_a_dead_holders_run_on_hold_costs_no_lock_for_ever(store: SQLiteStore, path: Path, ended: Owner) -> None:
    await create_leased(store, "run")
    await store.hold("run")
    await asyncio.to_thread(_forge, path, str(ended))
    assert (await store.claim(10, 60, [("flow", 1)])).claims == []
    before = store._database.writer.commits
    assert (await store.claim(10, 60, [("flow", 1)])).claims == []
    assert store._database.writer.commits == before
    await store.unhold("run")
    assert len((await store.claim(10, 60, [("flow", 1)])).claims) == 1


async def test_renewing_makes_the_lease_this_processs(store: SQLiteStore, path: Path) -> None:
    lease = await create_leased(store, "run")
    await asyncio.to_thread(_forge, path, "somebody")
    await store.renew([lease], 30)
    row = await store.get("run")
    assert row is not None
    assert row.lease_owner == str(await asyncio.to_thread(current))
    assert row.lease_until is not None
    assert row.lease_until - row.updated_at == 30 * MICROSECOND

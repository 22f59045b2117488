from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
from pathlib import Path

from perdure.backends.mongo import MongoStore
from perdure.model.records import Claim
from perdure.testing.contract.world import entry, new_run
from tests.campaign import IS_FULL

ROOT = Path(__file__).parents[3]


def start(word: str, dsn: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.backends.mongo.child", word, dsn]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def line(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    return process.stdout.readline().split()


def test_a_worker_that_was_asleep_while_another_took_over_is_refused(dsn: str) -> None:
    async def take_over() -> int:
        store = MongoStore(dsn)
        claims: list[Claim] = []
        while not claims:
            claims = (await store.claim(1, 600, [("flow", 1)])).claims
            await asyncio.sleep(0.05)
        last = max(entry.seq for entry in claims[0].journal)
        await store.record(claims[0].lease, [entry(last + 1, "ours")])
        await store.close()
        return last + 1

    async def journal() -> list[tuple[int, str]]:
        store = MongoStore(dsn)
        lines = [(entry.seq, entry.key) for entry in await store.journal("run")]
        await store.close()
        return lines

    zombie = start("zombie", dsn)
    assert line(zombie) == ["wrote", "1"]
    zombie.send_signal(signal.SIGSTOP)
    ours = asyncio.run(take_over())
    zombie.send_signal(signal.SIGCONT)
    said = zombie.communicate(timeout=60)[0].split("\n")
    assert said[-2].startswith("refused")
    assert asyncio.run(journal()) == [*((seq, f"step-{seq}") for seq in range(1, ours)), (ours, "ours")]


def test_many_processes_that_start_on_a_new_database_make_one_run(new_dsn: str) -> None:
    processes = [start("create", new_dsn) for _ in range(160 if IS_FULL else 8)]  # each sets the collections up
    for process in processes:
        assert line(process) == ["ready"]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [process.communicate(timeout=100)[0].strip() for process in processes]
    assert sorted(answers) == ["found"] * (len(processes) - 1) + ["new"]


def test_workers_that_are_killed_lose_nothing_they_were_told_is_written(dsn: str) -> None:
    rng = random.Random(5)

    async def begin() -> None:
        store = MongoStore(dsn)
        for n in range(10):
            await store.create(new_run(f"run-{n}"))
        await store.close()

    async def journals() -> dict[str, dict[int, str]]:
        store = MongoStore(dsn)
        found = {f"run-{n}": {e.seq: e.payload.decode() for e in await store.journal(f"run-{n}")} for n in range(10)}
        await store.close()
        return found

    asyncio.run(begin())
    told: list[list[str]] = []
    for _ in range(50 if IS_FULL else 3):
        workers = [start("work", dsn) for _ in range(2)]
        for worker in workers:
            told += [line(worker) for _ in range(rng.randrange(1, 15))]
        for worker in workers:
            worker.kill()
        for worker in workers:
            told += [words for words in map(str.split, worker.communicate()[0].splitlines(keepends=False)) if len(words) == 3]
    found = asyncio.run(journals())
    assert all(found[run_id][int(seq)] == token for run_id, seq, token in (words for words in told if len(words) == 3))
    assert len(told) > 20
    for lines in found.values():
        assert sorted(lines) == list(range(1, len(lines) + 1))

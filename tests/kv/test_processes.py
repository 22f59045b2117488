"""Several processes on one database: they start at once, are killed, fork, and lose nothing that was acknowledged."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from pathlib import Path

from perdure.kv.protocol import maybe_await
from tests.campaign import times
from tests.kv.places import Place

ROOT = Path(__file__).parent.parent.parent


def start(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.kv.child", *words]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


async def test_sixteen_processes_may_begin_on_a_new_place_at_once(shared_place: Place) -> None:
    def begin() -> list[str]:
        processes = [start("begin", shared_place.dsn, f"{n}") for n in range(16)]
        assert [line(process) for process in processes] == ["ready"] * 16
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        return [process.communicate(timeout=60)[0].strip() for process in processes]

    assert await asyncio.to_thread(begin) == ["1"] * 16
    kv = await shared_place.open()
    assert len(await maybe_await(kv.keys("*"))) == 16


async def test_writers_that_are_killed_lose_nothing_they_were_told_is_written(shared_place: Place) -> None:
    rng = random.Random(7)

    def live(lines: int) -> int:
        writer = start("write", shared_place.dsn)
        told = [line(writer) for _ in range(lines)]
        writer.kill()
        assert writer.stdout is not None
        told += writer.stdout.read().split()  # not communicate(), which knows nothing of what was read ahead
        writer.communicate()
        return int(told[-1])

    kv = await shared_place.open()
    for _ in range(times(50)):
        told = await asyncio.to_thread(live, rng.randrange(1, 20))
        assert int(await maybe_await(kv.get("top")) or 0) in {told, told + 1}
        for n in range(3):
            text = await maybe_await(kv.get(f"key {n}"))
            if text is None:
                assert told < 3
            else:
                number = int(text.split()[0])
                assert text == f"{number} " * 1000
                assert told - 3 < number <= told + 1


async def test_a_handle_can_be_used_on_both_sides_of_a_fork(shared_place: Place) -> None:
    forked = await asyncio.to_thread(start, "fork", shared_place.dsn)
    assert (await asyncio.to_thread(forked.communicate, timeout=60))[0].strip() == "20 child"
    assert forked.returncode == 0


async def test_a_run_that_saves_at_every_event_goes_on_after_every_kind_of_crash(shared_place: Place, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    lives = [("1", "in the step"), ("1", "after the save"), ("2", "before the save"), ("-", "never")]

    def live(step: str, when: str) -> tuple[int, str]:
        process = start("recover", shared_place.dsn, str(ledger), step, when)
        said, _ = process.communicate(timeout=60)
        return process.returncode, said.strip()

    ends = [await asyncio.to_thread(live, *life) for life in lives]
    assert [code for code, _ in ends] == [-9, -9, -9, 0]
    assert ends[-1][1] == "Ok(value=['receipt 0', 'receipt 1', 'receipt 2', 'receipt 3'])"
    # A charge is made again only when the crash came between it and its save.
    assert (await asyncio.to_thread(ledger.read_text)).split() == ["0", "1", "1", "2", "2", "3"]

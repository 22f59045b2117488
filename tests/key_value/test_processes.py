"""Real processes over one place: on S3 they share it, over a local directory the second is refused."""

from __future__ import annotations

import asyncio
import random
import signal

from perdure.records import Claim
from perdure.testing.contract.world import entry
from tests.campaign import times
from tests.key_value.child import opened
from tests.key_value.conftest import Child, Start


def line(child: Child) -> list[str]:
    assert child.stdout is not None
    return child.stdout.readline().split()


def test_a_worker_that_was_asleep_while_another_took_over_is_refused(s3_place: str, start: Start) -> None:
    async def take_over() -> int:
        store = opened(s3_place)
        claims: list[Claim] = []
        while not claims:
            claims = (await store.claim(1, 60, ["flow"])).claims
        last = max(one.seq for one in claims[0].journal)
        await store.record(claims[0].lease, [entry(last + 1, "ours")])
        await store.close()
        return last + 1

    async def journal() -> list[tuple[int, str]]:
        store = opened(s3_place)
        lines = [(one.seq, one.key) for one in await store.journal("run")]
        await store.close()
        return lines

    zombie = start("zombie", s3_place)
    assert line(zombie) == ["wrote", "1"]
    zombie.send_signal(signal.SIGSTOP)
    ours = asyncio.run(take_over())
    zombie.send_signal(signal.SIGCONT)
    said = zombie.communicate(timeout=60)[0].split("\n")
    assert said[-2].startswith("refused")
    assert asyncio.run(journal()) == [*((seq, f"step-{seq}") for seq in range(1, ours)), (ours, "ours")]


def test_many_processes_that_start_one_id_make_one_run(s3_place: str, start: Start) -> None:
    children = [start("create", s3_place) for _ in range(max(8, times(32)))]
    for child in children:
        assert line(child) == ["ready"]
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    answers = [child.communicate(timeout=100)[0].strip() for child in children]
    assert answers.count("new") == 1
    assert answers.count("found") == len(children) - 1


async def lost(place: str, said: list[list[str]]) -> list[str]:
    """The runs of which something that was said is not there, or that are not due though their lease has ended."""
    reached: dict[str, int] = {}
    for _, run_id, seq in said:
        reached[run_id] = int(seq)
    store = opened(place)
    await asyncio.sleep(0.1)  # the leases that the killed process left are half as long
    due = set(await store.due(limit=100_000))
    journals = {run_id: len(await store.journal(run_id)) for run_id in reached}
    await store.close()
    return [run_id for run_id, seq in reached.items() if journals[run_id] < seq or run_id not in due]


def kill_often(place: str, start: Start, kills: int) -> None:
    said: list[list[str]] = []
    for n in range(kills):
        child = start("work", place, f"life-{n}")
        assert line(child) == ["ready"]
        said += [line(child) for _ in range(random.randrange(3, 25))]
        child.kill()
        assert child.stdout is not None
        said += [words for text in child.stdout if len(words := text.split()) == 3 and text.endswith("\n")]
        child.wait()
    assert asyncio.run(lost(place, said)) == []


def test_nothing_is_lost_and_everything_wakes_however_often_the_one_process_is_killed(local_place: str, start: Start) -> None:
    kill_often(local_place, start, times(100))


def test_nothing_is_lost_and_everything_wakes_however_often_a_process_on_s3_is_killed(s3_place: str, start: Start) -> None:
    kill_often(s3_place, start, times(40))


def test_a_second_process_is_refused_where_only_one_may_be(local_place: str, start: Start) -> None:
    first = start("have", local_place)
    assert line(first) == ["ready"]
    second = start("have", local_place)
    told = " ".join(line(second))
    assert told.startswith("refused the key_value store has no way to serve two processes without compare-and-swap")
    assert f"process {first.pid} on host" in told
    first.kill()
    first.wait()
    assert line(start("have", local_place)) == ["ready"]


def test_a_place_that_was_closed_is_free_for_the_next_process(local_place: str, start: Start) -> None:
    async def come_and_go() -> None:
        store = opened(local_place)
        await store.setup()
        await store.close()

    asyncio.run(come_and_go())
    assert line(start("have", local_place)) == ["ready"]

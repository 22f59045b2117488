"""What is left of a log after a crash or on a bad disk."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest

from perdure.backends.files import FilesStore, log
from perdure.backends.files.disk import namespace_name, run_name
from perdure.backends.files.frames import HEADER, make_frame
from perdure.errors import PersistenceError, SnapshotCorrupt
from perdure.model.records import Lease
from perdure.testing.contract.world import new_run
from tests.backends.disk_child import create_leased, entry, record
from tests.campaign import IS_FULL, times


def log_of(path: Path, run_id: str = "run") -> Path:
    return path / namespace_name("") / "runs" / run_name(run_id) / "log"


def written(path: Path, count: int) -> Lease:
    """A run with so many entries, by a store that is closed again."""

    async def write(store: FilesStore) -> Lease:
        lease = await create_leased(store, "run")
        await record(store, lease, range(1, count + 1))
        await store.close()
        return lease

    return asyncio.run(write(FilesStore(path)))


def seqs(store: FilesStore) -> list[int]:
    return [line.seq for line in asyncio.run(store.journal("run"))]


def tails(whole: bytes, kept: int) -> list[bytes]:
    """What a crash may leave of a log whose last record begins at `kept`."""
    rng = random.Random(1)
    cut = [whole[:end] for end in rng.sample(range(kept, len(whole)), times(200))]
    zeros = [
        whole[:kept] + b"\0" * (len(whole) - kept),
        whole[:kept] + b"\0" * 5,
        whole[: kept + 30] + b"\0" * (len(whole) - kept - 30),
    ]
    return [*cut, *zeros]


def test_a_torn_tail_is_never_read_and_is_cut_off(path: Path) -> None:
    lease = written(path, 2)
    kept = log_of(path).stat().st_size
    asyncio.run(record(FilesStore(path), lease, range(3, 4)))
    whole = log_of(path).read_bytes()
    for tail in tails(whole, kept):
        log_of(path).write_bytes(tail)
        store = FilesStore(path)
        assert seqs(store) == [1, 2]
        assert log_of(path).read_bytes() == tail, "whoever only reads changes nothing"
        asyncio.run(record(store, lease, range(4, 5)))
        assert seqs(store) == [1, 2, 4]
        asyncio.run(store.close())
        assert seqs(FilesStore(path)) == [1, 2, 4]
        assert log_of(path).read_bytes()[:kept] == whole[:kept]
        assert log_of(path).stat().st_size == len(whole), "nothing of the tail is left behind the new record"


def test_a_tail_that_was_not_written_whole_is_kept_beside_the_log(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lease = written(path, 2)
    kept = log_of(path).stat().st_size
    asyncio.run(record(FilesStore(path), lease, range(3, 4)))
    whole = log_of(path).read_bytes()
    torn = whole[: kept + 30] + b"\0" * (len(whole) - kept - 30)
    log_of(path).write_bytes(torn)
    asyncio.run(record(FilesStore(path), lease, range(4, 5)))
    aside = log_of(path).with_name(f"log.cut-{kept}")
    assert aside.read_bytes() == torn[kept:]
    assert [line for line in caplog.messages if str(aside) in line and "'run'" in line]


def test_no_flipped_bit_brings_a_completed_run_back(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lease = written(path, 2)

    async def finish() -> None:
        store = FilesStore(path)
        await store.finish(lease, "completed", b"1")
        await store.close()

    asyncio.run(finish())
    whole = log_of(path).read_bytes()
    statuses: Counter[str] = Counter()

    async def look() -> str:
        store = FilesStore(path)
        try:
            claims = (await store.claim(10, 60, [("flow", 1)], now=lease.until + 1)).claims
            row = await store.get("run")
        except SnapshotCorrupt:
            (line,) = await store.list()
            assert (line.id, "cannot be read back" in (line.problem or "")) == ("run", True)
            assert await store.purge(0, now=lease.until + 1) == 0
            return "damaged"
        else:
            return "claimed" if claims else "missing" if row is None else row.status
        finally:
            await store.close()

    bits = range(8 * len(whole)) if IS_FULL else random.Random(1).sample(range(8 * len(whole)), 150)
    for bit in bits:
        spoilt = bytearray(whole)
        spoilt[bit // 8] ^= 1 << bit % 8
        log_of(path).write_bytes(spoilt)
        statuses[asyncio.run(look())] += 1
        assert log_of(path).read_bytes() == spoilt, "damage is left as it is"
    assert statuses == {"damaged": len(bits)}
    assert [line for line in caplog.messages if "cannot be read back" in line]
    log_of(path).write_bytes(whole)
    assert asyncio.run(look()) == "completed"


def test_a_store_that_read_before_the_crash_reads_on_after_it(path: Path, store: FilesStore) -> None:
    lease = written(path, 2)
    assert seqs(store) == [1, 2]
    with log_of(path).open("ab") as file:
        file.write(b"half a rec")
    assert seqs(store) == [1, 2]
    asyncio.run(record(FilesStore(path), lease, range(3, 4)))
    assert seqs(store) == [1, 2, 3]


def test_damage_before_good_records_is_reported_and_left_alone(path: Path) -> None:
    lease = written(path, 5)
    whole = log_of(path).read_bytes()
    for at in random.Random(1).sample(range(HEADER, len(whole) - 2000), times(200)):
        spoilt = whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
        log_of(path).write_bytes(spoilt)
        store = FilesStore(path)
        with pytest.raises(SnapshotCorrupt):
            seqs(store)
        with pytest.raises(SnapshotCorrupt):
            asyncio.run(record(store, lease, range(6, 7)))
        assert log_of(path).read_bytes() == spoilt


@pytest.mark.parametrize("content", [b"", b"perdure", b"\0" * 100, b"perdure\x02" + b"x" * 100])
def test_a_log_without_its_beginning_is_reported(path: Path, content: bytes) -> None:
    written(path, 1)
    log_of(path).write_bytes(content)
    with pytest.raises(SnapshotCorrupt):
        seqs(FilesStore(path))


async def test_a_run_that_cannot_be_read_holds_up_nobody_and_can_be_deleted(path: Path, store: FilesStore) -> None:
    for run_id in ("a", "bad", "c"):
        await store.create(new_run(run_id))
    await asyncio.to_thread(log_of(path, "bad").write_bytes, b"rubbish")
    other = store.sibling()
    assert [claim.run.id for claim in (await other.claim(10, 60, [("flow", 1)])).claims] == ["a", "c"]
    with pytest.raises(SnapshotCorrupt):
        await other.get("bad")
    await other.delete("bad")
    assert await other.get("bad") is None
    assert (await other.create(new_run("bad"))).is_new


def test_a_payload_that_looks_like_a_record_is_none(path: Path) -> None:
    lease = written(path, 1)
    whole = log_of(path).read_bytes()
    store = FilesStore(path)

    async def copy() -> None:
        look_alike = make_frame(b"\x80", whole[:HEADER], len(whole) + 10_000)
        await store.record(lease, [entry(2)])
        await store.report(lease, whole + look_alike)

    asyncio.run(copy())
    end = log_of(path).stat().st_size
    log_of(path).write_bytes(log_of(path).read_bytes()[: end - 1])
    assert seqs(FilesStore(path)) == [1, 2]


async def test_a_log_does_not_grow_with_the_renewals_of_its_lease(
    path: Path, store: FilesStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "_MOST_WASTE", 2000)
    lease = await create_leased(store, "run")
    await store.signal("run", "go", b"1", dedupe="d")
    await store.record(lease, [entry(1)], consume=[1])
    for _ in range(200):
        await store.renew([lease], 600)
    before = await store.get("run")
    assert (await asyncio.to_thread(log_of(path).stat)).st_size < 8000
    await store.close()
    again = await asyncio.to_thread(FilesStore, path)
    assert await again.get("run") == before
    assert await again.journal("run") == [entry(1)]
    assert await again.signal("run", "go", b"1", dedupe="d") == 1
    await again.record(lease, [entry(2)])
    assert len(await again.journal("run")) == 2


async def test_a_link_in_a_run_s_directory_is_not_followed(path: Path, tmp_path: Path) -> None:
    await asyncio.to_thread(written, path, 1)
    elsewhere = tmp_path / "elsewhere"
    log = log_of(path)
    await asyncio.to_thread(log.rename, elsewhere)
    await asyncio.to_thread(log.symlink_to, elsewhere)
    store = FilesStore(path)
    with pytest.raises(PersistenceError, match="symbolic links"):
        await store.get("run")
    await store.close()

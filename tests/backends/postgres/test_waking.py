import pytest

from perdure.backends.postgres import PostgresStore
from perdure.model.records import Awaited
from perdure.testing.contract.world import NOW, TTL, new_run


@pytest.mark.parametrize("key", ["plain", 'a"b', "a\\b", "\n\t\x01\x1f\x7f\u2028/", "\u00e9\U0001f600", '["child","other"]'])
async def test_a_parent_is_woken_by_the_child_it_waits_for(store: PostgresStore, key: str) -> None:
    parent = (await store.create(new_run("parent"), ttl=TTL, now=NOW)).claim
    children = [
        (await store.create(new_run(f"child-{n}", parent_id="parent", parent_key=of), ttl=TTL, now=NOW)).claim
        for n, of in enumerate(["other", key])
    ]
    assert parent is not None
    await store.suspend(parent.lease, wake_at=None, waiting_for=[Awaited("child", key), Awaited("signal", "other")], now=NOW)
    woken = []
    for child in children:
        assert child is not None
        await store.finish(child.lease, "completed", b"1", now=NOW)
        run = await store.get("parent")
        woken.append(run is not None and run.wake_at is not None)
    assert woken == [False, True]

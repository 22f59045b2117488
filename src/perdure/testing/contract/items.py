"""Items: what a run streams out, numbered in each stream."""

from __future__ import annotations

from perdure.model.records import Item
from perdure.testing.contract.cases import promise
from perdure.testing.contract.checks import equal
from perdure.testing.contract.world import NOW, World


@promise
async def items_come_in_order_and_in_pages(world: World) -> None:
    """`items` gives those numbered above `after`, in order, a hundred at a time unless another limit is given."""
    lease = await world.lease()
    written = [Item(stream="log", n=n, payload=b"%d" % n) for n in range(105)]
    await world.a.record(lease, items=list(reversed(written)), now=NOW)
    equal(await world.b.items("run", "log"), written[:100], "the first page")
    equal(await world.b.items("run", "log", after=99), written[100:], "the second page")
    equal(await world.b.items("run", "log", after=3, limit=2), written[4:6], "a small page")
    equal(await world.b.items("run", "log", after=104), [], "the page after the last item")


@promise
async def streams_are_counted_apart(world: World) -> None:
    """Each stream of each run has its own numbers from 0, and an unknown run or stream has no items."""
    for run_id in ("run", "other"):
        lease = await world.lease(run_id)
        items = [Item(stream=name, n=n, payload=f"{run_id}/{name}/{n}".encode()) for name in ("log", "out") for n in range(2)]
        await world.a.record(lease, items=items, now=NOW)
    equal([item.payload for item in await world.b.items("other", "out")], [b"other/out/0", b"other/out/1"], "items of one stream")
    equal((await world.b.items("run", "none"), await world.b.items("none", "log")), ([], []), "items that are not there")
    await world.a.delete("other")
    equal((await world.b.items("other", "log"), len(await world.b.items("run", "log"))), ([], 2), "items after a run was deleted")

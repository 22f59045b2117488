"""Keys, time and chance of one place are never those of another, and the same on every replay."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure import Context, Ok, workflow
from perdure.context import full_key
from tests.engine.own_waits import own_wait
from tests.engine.replays import twice
from tests.engine.steps import Steps
from tests.engine.worlds import world
from tests.simulation import simulate

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


Place = tuple[tuple[str, ...], str]


@st.composite
def cut_up(draw: st.DrawFn, pieces: list[str]) -> Place:
    """The pieces as the names of scopes and a key: joined by slashes here, by escaped ones there, and cut in between."""
    names = [pieces[0]]
    for piece in pieces[1:]:
        joint = draw(st.sampled_from(["/", "%2F", "%252F", None]))
        if joint is None:
            names.append(piece)
        else:
            names[-1] += joint + piece
    return tuple(names[:-1]), names[-1]


# What could be mistaken for a separator, an escape, or one of the marks of a derived value.
pieces = st.lists(st.sampled_from(["a", "b", "%", "25", "#0", "=a", "%2F"]), min_size=1, max_size=4)
alike = pieces.flatmap(lambda parts: st.tuples(cut_up(parts), cut_up(parts)))


@given(places=alike)
def test_no_two_places_have_one_key(places: tuple[Place, Place]) -> None:
    one, other = places
    assert (full_key(*one) == full_key(*other)) == (one == other)


@given(key=st.text(min_size=1, max_size=20).filter(lambda text: text[0] not in "/%" and "\0" not in text))
def test_a_key_outside_any_scope_is_recorded_as_it_is_written(key: str) -> None:
    try:
        key.encode()
    except UnicodeEncodeError:
        return
    assert full_key((), key) == key


async def test_helpers_called_twice_live_in_scopes_and_keys_that_look_alike_stay_apart() -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> int:
        steps = Steps()
        for scope, key in [("a/b", "c"), ("a", "b/c"), ("a%2Fb", "c")]:
            await ctx.scope(scope).step("w", steps.work, 1, key=key)
        await ctx.scope("a").scope("b").step("w", steps.work, 1, key="c")
        for key in ["/a/b/c", "a/b/c", "%2Fa/b/c", "/a%2Fb/c"]:
            await ctx.step("w", steps.work, 1, key=key)
        return len(steps.started)

    async with world(flow) as here:
        assert await here.runtime.run(flow, id="run") == Ok(8)
        assert len(set(await here.keys("run"))) == 8


@pytest.mark.parametrize("name", ["", None, 5, b"x"], ids=repr)
async def test_a_scope_needs_a_name(name: Any) -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> None:
        with pytest.raises(TypeError):
            ctx.scope(name)

    await flow()


async def test_time_and_chance_are_the_same_on_replay() -> None:
    async def body(ctx: Context[Any]) -> Any:
        values: list[Any] = [ctx.now(), ctx.uuid4(), ctx.random(), ctx.uuid4(), ctx.random(), ctx.random(key="k")]
        await asyncio.gather(ctx.step("a", asyncio.sleep, 0.001), ctx.step("b", asyncio.sleep, 0))
        inner = ctx.scope("inner")
        values += [ctx.now(), inner.uuid4(), inner.random(), ctx.uuid4(key="k"), ctx.uuid4(key="k"), ctx.random(key="k")]
        return values

    first, second = await twice(body)
    assert first == second
    assert first[9] == first[10], "a key gives one value"
    assert first[5] == first[11]
    assert len({str(value) for value in first}) == len(first) - 3, "and the rest are all different"
    assert all(0 <= number < 1 for number in (first[2], first[4]))
    assert first[1].version == 4


async def test_chance_in_one_scope_does_not_depend_on_how_much_was_used_in_another() -> None:
    drawn: list[Any] = []

    @workflow
    async def flow(ctx: Context[Any]) -> None:
        for _ in range(5 * len(drawn)):
            ctx.uuid4()
            ctx.random()
            ctx.scope("other").uuid4()
        drawn.append((ctx.scope("mine").uuid4(), ctx.scope("mine").random()))
        await ctx.sleep("end", "1h")

    async with world(flow) as here:
        await here.runtime.run(flow, id="run")
        await here.later("1h")
        assert drawn[0] == drawn[1]
        await here.runtime.run(flow, id="another")
        assert drawn[0] != drawn[2], "another run has another seed"


@given(places=alike, is_keyed=st.booleans())
def test_no_two_places_draw_the_same_number(places: tuple[Place, Place], is_keyed: bool) -> None:
    def drawn(ctx: Context[Any], place: Place, *, keyed: bool) -> Any:
        for name in place[0]:
            ctx = ctx.scope(name)
        return ctx.uuid4(key=place[1]) if keyed else ctx.scope(place[1]).uuid4()

    @workflow
    async def flow(ctx: Context[Any]) -> bool:
        return bool(drawn(ctx, places[0], keyed=is_keyed) == drawn(ctx, places[1], keyed=is_keyed))

    # Without a key, a second call in the same place draws the next number.
    assert simulate(flow()) == (places[0] == places[1] and is_keyed)


async def test_a_key_cannot_be_mistaken_for_a_number_in_a_scope() -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> bool:
        return ctx.uuid4(key="x/#0") != ctx.scope("=x").uuid4() and ctx.uuid4(key="x/=y") != ctx.scope("=x").uuid4(key="y")

    assert await flow()


async def test_now_stands_still_between_records_and_follows_them() -> None:
    @workflow
    async def flow(ctx: Context[Any]) -> Any:
        times = [ctx.now()]
        await own_wait(0.001)
        times.append(ctx.now())
        await ctx.sleep("a", "1h")
        times.append(ctx.now())
        await ctx.sleep("b", "1h")
        times.append(ctx.now())
        return [(at - EPOCH).total_seconds() for at in times]

    async with world(flow) as here:
        await here.runtime.run(flow, id="run")
        await here.later("3h")
        assert await here.later("2h") == {"run": Ok([0, 0, 10_800, 18_000])}

"""Random programs: trees of constructs, made from a seed alone and shown as text that reads like Python.

A construct registers itself here with the function that runs it, so this module knows their names and shapes only.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

if TYPE_CHECKING:
    from tests.fuzz.body import Body

# What a construct may need: I/O of the body's own (`own`), a store with transactions (`sql`), a library, or a version of Python.
Need: TypeAlias = Literal["own", "sql", "anyio", "aiosqlite", "3.12"]
Run: TypeAlias = "Callable[[Body, Node], Awaitable[Any]]"
Arguments: TypeAlias = Callable[[random.Random], tuple[Any, ...]]

DEEPEST: Final = 3
# One program in so many has I/O of the body's own. Its place among recorded results is not repeated on a replay.
OWN_IO_EVERY: Final = 4


@dataclass(frozen=True)
class Node:
    """One construct. `at` is its place in the tree, and the key of what it records."""

    kind: str
    at: str
    args: tuple[Any, ...] = ()
    inside: tuple[Node, ...] = ()

    def all(self) -> Iterator[Node]:
        """Yield the node and every node inside it."""
        yield self
        for node in self.inside:
            yield from node.all()

    def lines(self, depth: int = 0) -> Iterator[str]:
        """Yield the node as lines of text, two columns deeper for each level."""
        call = f"{self.kind}({', '.join(map(repr, self.args))})"
        yield f"{'    ' * depth}await {call}{':' if self.inside else ''}  # {self.at}"
        for node in self.inside:
            yield from node.lines(depth + 1)


@dataclass(frozen=True)
class Construct:
    """What a kind of node is made of: how many nodes are inside, its arguments, what it needs, and what runs it."""

    kind: str
    run: Run
    inside: tuple[int, int]
    args: Arguments
    needs: frozenset[Need]
    weight: int


CONSTRUCTS: Final[dict[str, Construct]] = {}


def construct(
    kind: str,
    *needs: Need,
    inside: tuple[int, int] = (0, 0),
    args: Arguments = lambda _: (),
    weight: int = 1,
) -> Callable[[Run], Run]:
    """Register the function that runs nodes of this kind."""

    def register(run: Run) -> Run:
        CONSTRUCTS[kind] = Construct(kind, run, inside, args, frozenset(needs), weight)
        return run

    return register


@dataclass(frozen=True)
class Program:
    """A workflow function as data, with what is done to its run from outside."""

    seed: int
    tree: Node
    # How often it starts over with `ctx.continue_as`.
    rounds: int = 0
    # After how many seconds the run is cancelled, and how long it may take.
    cancel_after: float | None = None
    deadline: float | None = None
    # Whether an error that leaves the tree leaves the workflow function too.
    raises: bool = False
    # Whether the workflow function calls steps after it was cancelled.
    cleans_up: bool = False
    # Whether its steps may cancel the run.
    cancels_itself: bool = False

    @property
    def has_own_io(self) -> bool:
        """Return whether the body waits for I/O of its own, beside recorded results: those come at another place another time."""
        return not self.is_in_sequence and any("own" in CONSTRUCTS[node.kind].needs for node in self.tree.all())

    @property
    def is_in_sequence(self) -> bool:
        """Return whether own I/O never runs beside a call, so that everything is repeated."""
        return all(node.kind in IN_SEQUENCE for node in self.tree.all())

    @property
    def is_cut_short(self) -> bool:
        """Return whether the run may be cancelled, by a request or by its deadline."""
        return self.cancel_after is not None or self.deadline is not None or self.cancels_itself

    def __str__(self) -> str:
        shown = ["rounds", "cancel_after", "deadline", "raises", "cleans_up", "cancels_itself"]
        options = [f"{name}={value!r}" for name in shown if (value := getattr(self, name))]
        return "\n".join([f"program {self.seed}: {', '.join(options)}", *self.tree.lines()])


def available(store: str) -> frozenset[Need]:
    """Return what constructs may need here."""
    found: set[Need] = set()
    if store == "sqlite":
        found.add("sql")
    if find_spec("anyio") is not None:
        found.add("anyio")
    if find_spec("aiosqlite") is not None:
        found.add("aiosqlite")
    if sys.version_info >= (3, 12):
        found.add("3.12")
    return frozenset(found)


def random_program(seed: int, haves: frozenset[Need]) -> Program:
    """Return the program of this seed, of constructs that need no more than this."""
    rng = random.Random(f"perdure {seed}")
    is_own = seed % OWN_IO_EVERY == OWN_IO_EVERY - 1
    known = [each for each in CONSTRUCTS.values() if each.needs <= haves | ({"own"} if is_own else frozenset())]
    if is_own:
        # A time limit or a race around own I/O may end another way on a replay, and what follows is then another program.
        known = [each for each in known if "own" in each.needs or each.kind in BESIDE_OWN_IO]
    tree = Node("seq", "r", (), tuple(_random_node(rng, known, f"r.{n}", 0) for n in range(rng.randint(2, 4))))
    program = Program(seed, tree, raises=rng.random() < 0.3, cleans_up=rng.random() < 0.5)
    if rng.random() < 0.1:
        program = replace(program, rounds=rng.randint(1, 2))
    if not is_own and rng.random() < 0.15:
        after = rng.random() * 0.03
        is_request = rng.random() < 0.5
        program = replace(program, cancel_after=after) if is_request else replace(program, deadline=after)
    return program


def aimed_program(seed: int, kind: str, haves: frozenset[Need]) -> Program:
    """Return a program of one construct, alone."""
    chosen, rng = CONSTRUCTS[kind], random.Random(seed)
    inside = tuple(Node("step", f"r.0.{number}") for number in range(chosen.inside[0]))
    tree = Node("seq", "r", (), (Node(kind, "r.0", chosen.args(rng), inside),))
    return Program(seed, tree, cleans_up=True, cancels_itself=kind == "cancelled_in_step")


# Constructs whose I/O comes before or after their calls.
IN_SEQUENCE: Final = frozenset({"seq", "cancelled_in_step", "limit_after_io"})
BESIDE_OWN_IO: Final = frozenset(
    {"step", "slow", "seq", "gather", "group", "signal", "sleep", "child", "deep", "cleanup", "thread_step"}
)


def _random_node(rng: random.Random, known: list[Construct], at: str, depth: int) -> Node:
    fitting = [each for each in known if depth < DEEPEST or not each.inside[1]]
    chosen = rng.choices(fitting, [each.weight * (2 if each.inside[1] and depth < 2 else 1) for each in fitting])[0]
    count = rng.randint(*chosen.inside)
    inside = tuple(_random_node(rng, known, f"{at}.{n}", depth + 1) for n in range(count))
    return Node(chosen.kind, at, chosen.args(rng), inside)

"""Random sagas as data: workflows made of charges and waits, what operators and deploys do to them, and how to read one.

A program is made from a seed alone. Its nodes have a place (`at`), which names what they do to the world and stays the same in
every version of the code, and a key, under which perdure records them and which a deploy may change. Since a program is data, a
deploy is a function from one version to the next, and a program that fails can be cut down.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Final

# How often something happens that happens always.
ALWAYS: Final = 1_000_000
# Keys that could be taken for others, once they stand beside the id of a run or a mark of perdure's.
KEYS: Final = ("charge", "pay", "fee", "charge~1", "c/charge", "charge;generation=1", "%7E", "pay[0]", "s")
SCOPES: Final = ("", "", "", "", "", "", "c", "s")
CHILD_KEYS: Final = ("c", "d", "sub", "c~1")
RUN_IDS: Final = ("r", "r/c", "r~1", "r;generation=1", "r%2Fc", "q")
SIGNALS: Final = ("go", "stop")
SECONDS: Final = (0.5, 3.0, 20.0, 90.0)


@dataclass(frozen=True)
class Node:
    """One construct. Most fields mean something for some kinds only.

    - `asked`: whether a compensation is asked for.
    - `fails`: how many calls of the function fail, before they charge; `hangs`: how many of the next ones charge and never end.
    - `undo_fails`: how many calls of the compensation fail; `undo_late`: after they have refunded.
    - `caught`: whether the body handles its failure. `keyed`: how the refund knows the key of the charge: it is asked
      for before the step (eager) or in the compensation (late), or it is what the compensation is told (told).
    """

    kind: str
    at: str
    key: str = ""
    branches: tuple[tuple[Node, ...], ...] = ()
    scope: str = ""
    asked: bool = False
    plain: bool = False
    once: bool = False
    tries: int = 1
    fails: int = 0
    hangs: int = 0
    caught: bool = False
    keyed: str = "eager"
    undo_fails: int = 0
    undo_late: bool = False
    undo_tries: int = 1
    aliases: tuple[str, ...] = ()
    seconds: float = 0.0
    count: int = 0

    def __str__(self) -> str:
        return "\n".join(lines_of(self))


def lines_of(node: Node, indent: str = "") -> Iterator[str]:
    """The node as a person reads it."""
    default = Node(node.kind, node.at)
    shown = [
        each.name if value is True else f"{each.name}={value!r}"
        for each in fields(Node)
        if each.name not in ("kind", "at", "branches") and (value := getattr(node, each.name)) != getattr(default, each.name)
    ]
    yield f"{indent}{node.kind} {node.at} {' '.join(shown)}".rstrip()
    for number, branch in enumerate(node.branches):
        if len(node.branches) > 1:
            yield f"{indent}  branch {number}:"
        for inner in branch:
            yield from lines_of(inner, indent + ("    " if len(node.branches) > 1 else "  "))


@dataclass(frozen=True)
class Version:
    """The code as one deploy has it: the body of `main`, and the keys that it has no more; it may say how these are undone."""

    nodes: tuple[Node, ...]
    retired: tuple[str, ...] = ()
    undoes_retired: bool = False


@dataclass(frozen=True)
class Start:
    """A run that is started: its id, and how many seconds it has."""

    run_id: str
    deadline: float | None = None


@dataclass(frozen=True)
class Op:
    """Something that is done to the runs, `after` so many seconds. `pick` chooses a run, or 1 all of them, and `n` what in it."""

    kind: str
    after: float
    pick: float = 0.0
    n: int = 0
    what: str = ""
    is_after: bool = False

    def __str__(self) -> str:
        shown = [f"{each.name}={value!r}" for each in fields(Op)[2:] if (value := getattr(self, each.name)) not in (0, "", False)]
        return f"+{self.after:g}s {self.kind} {' '.join(shown)}"


@dataclass(frozen=True)
class Program:
    """What is started, in which code, and what is done to it."""

    seed: int
    version: Version
    starts: tuple[Start, ...]
    ops: tuple[Op, ...] = ()
    max_attempts: int = 10
    grace: float = 0.0

    def __str__(self) -> str:
        lines = [f"seed {self.seed}, max_attempts={self.max_attempts}, unload_grace={self.grace:g}"]
        lines += [
            f"start main as {start.run_id!r}" + (f" with {start.deadline:g} s" if start.deadline else "") for start in self.starts
        ]
        lines += ["main:", *(line for node in self.version.nodes for line in lines_of(node, "  "))]
        return "\n".join([*lines, "then:", *(f"  {op}" for op in self.ops)])


def all_nodes(nodes: tuple[Node, ...]) -> Iterator[Node]:
    """Every node, outer ones first, with those of children."""
    for node in nodes:
        yield node
        for branch in node.branches:
            yield from all_nodes(branch)


def rewrite(nodes: tuple[Node, ...], change: Callable[[tuple[Node, ...]], tuple[Node, ...]]) -> tuple[Node, ...]:
    """The nodes with `change` applied to every sequence in them."""
    return tuple(replace(node, branches=tuple(rewrite(branch, change) for branch in node.branches)) for node in change(nodes))


# From here on: how a program is made.

PAYING: Final = (*("pay",) * 8, "check", "map")
WAITING: Final = ("sleep", "signal")
BRANCHING: Final = ("gather", "gather", "group", "limit", "race", "guard", "child", "child", "each")
ENDING: Final = ("bug", "refuse", "again")


@dataclass
class _Maker:
    """Makes a program. `used` has the keys of each workflow: a key is used once in it."""

    rng: random.Random
    used: list[set[tuple[str, str]]] = field(default_factory=lambda: [set()])

    def nodes(self, depth: int, path: str) -> tuple[Node, ...]:
        rng = self.rng
        kinds = (*PAYING, *WAITING, *WAITING, *(BRANCHING if depth else ()))
        return tuple(self.node(rng.choice(kinds), f"{path}.{number}", depth) for number in range(rng.randint(1, 3)))

    def node(self, kind: str, at: str, depth: int) -> Node:
        rng = self.rng
        match kind:
            case "pay" | "check" | "map":
                return self.payment(kind, at)
            case "sleep":
                return Node("sleep", at, self.key(at), seconds=rng.choice(SECONDS))
            case "signal":
                seconds = rng.choice((0.0, *SECONDS))
                return Node("signal", at, rng.choice(SIGNALS), seconds=seconds)
            case "child" | "each":
                return self.child(kind, at, depth)
        branches = 1 if kind in ("limit", "guard") else rng.randint(2, 3)
        inner = tuple(self.nodes(depth - 1, f"{at}{letter}") for letter in "abc"[:branches])
        node = Node(kind, at, self.key(at), inner, seconds=rng.choice(SECONDS), caught=rng.random() < 0.5)
        return replace(node, branches=(*inner, (self.payment("pay", f"{at}f"),))) if kind == "guard" else node

    def child(self, kind: str, at: str, depth: int) -> Node:
        rng = self.rng
        key = self.key(at, CHILD_KEYS)
        self.used.append(set())
        inner = self.nodes(depth - 1, f"{at}c")
        self.used.pop()
        count = rng.randint(1, 3) if kind == "each" else 0
        return Node(kind, at, key, (inner,), caught=rng.random() < 0.3, asked=rng.random() < 0.5, count=count)

    def payment(self, kind: str, at: str) -> Node:
        rng = self.rng
        scope = rng.choice(SCOPES) if kind == "pay" else ""
        key = self.key(at, KEYS, scope)
        tries = rng.choice((1, 1, 1, 2, 3))
        hangs = rng.choice((0, 0, 0, 0, 0, 0, 0, 1, 1, ALWAYS))
        undo_fails = rng.choice((0, 0, 0, 0, 0, 1, 2, ALWAYS))
        undo_tries = rng.choice((1, 3))
        return Node(
            kind,
            at,
            key,
            scope=scope,
            asked=kind != "check" and rng.random() < 0.7,
            plain=rng.random() < 0.25,
            once=tries == 1 and rng.random() < 0.2,
            tries=tries,
            fails=rng.choice((0, 0, 1, 1, 2, 5, ALWAYS)) if kind == "check" else rng.choice((0,) * 12 + (1, 1, 2, ALWAYS)),
            hangs=hangs if kind != "check" else 0,
            caught=rng.random() < 0.25,
            keyed=rng.choice(("eager", "late", "told")),
            undo_fails=undo_fails,
            # Refunded and lost on the way back: what is tried again often enough ends well.
            undo_late=undo_fails < undo_tries and rng.random() < 0.5,
            undo_tries=undo_tries,
            count=rng.randint(1, 3) if kind == "map" else 0,
        )

    def key(self, at: str, choices: tuple[str, ...] = (), scope: str = "") -> str:
        """A key that this workflow has not used."""
        used = self.used[-1]
        for _ in range(3):
            key = self.rng.choice(choices) if choices else ""
            own = (scope, key.partition("[")[0])  # the items of a map have keys of their own
            if key and own not in used:
                used.add(own)
                return key
        return f"k{at}"


EDITS: Final = ("insert", "append", "rename", "alias", "remove", "retire", "retire with", "unask", "ask", "fix", "swap")


def random_program(seed: int) -> Program:
    """The program of this seed."""
    rng = random.Random(seed)
    maker = _Maker(rng)
    nodes = maker.nodes(2, "")
    if rng.random() < 0.4:
        nodes = (*nodes, Node("check", ".x", "x", fails=rng.choice((1, 2, ALWAYS))))
    if rng.random() < 0.25:
        kind = rng.choice(ENDING)
        nodes = (*nodes, Node(kind, ".e", "e", count=1 if kind == "again" else 0))
    version = Version(nodes)
    ids = rng.sample(RUN_IDS, rng.choice((1, 1, 1, 2, 3)))
    starts = tuple(Start(run_id, rng.choice((None, None, None, None, 2.0, 30.0))) for run_id in ids)
    kinds = rng.choice((CALM, CALM, DEPLOYING, CRASHING, EVERYTHING, EVERYTHING))
    places = [node.at for node in all_nodes(nodes)]
    ops = tuple(_random_op(rng, rng.choice(kinds), places) for _ in range(rng.randint(0, 9)))
    return Program(seed, version, starts, ops, rng.choice((1, 2, 3, 10)), rng.choice((0.0, 0.0, 0.5)))


def program_to_repair(seed: int) -> Program:
    """A program whose bug is repaired while the run undoes what it has done, or at another moment."""
    rng = random.Random(seed)
    maker = _Maker(rng)
    paying = [
        replace(maker.payment("pay", f".{number}"), asked=True, fails=0, undo_fails=0) for number in range(rng.randint(2, 4))
    ]
    ops = (
        Op("crash", 0.0, n=rng.randint(4, 6 * len(paying)), is_after=rng.random() < 0.5),
        Op("deploy", 1.0, what="fix .e"),
        Op("retry", 60.0, 1.0),
    )
    return Program(seed, Version((*paying, Node("bug", ".e"))), (Start("r"),), ops)


_OPERATING: Final = ("retry", "retry", "retry all", "retry all", "cancel", "fork", "signal", "signal")
CALM: Final = (*_OPERATING, "crash")
DEPLOYING: Final = (*_OPERATING, "deploy", "deploy", "deploy", "rollback", "cancel")
CRASHING: Final = (*_OPERATING, "crash", "crash", "crash", "flaky", "kill", "poison")
EVERYTHING: Final = (*_OPERATING, "crash", "crash", "flaky", "kill", "poison", "deploy", "deploy", "rollback", "abandon")


def _random_op(rng: random.Random, kind: str, places: list[str]) -> Op:
    after, pick = rng.choice((0.0, 0.01, 0.1, 1.0, 10.0, 60.0)), rng.random()
    match kind:
        case "crash" | "flaky":
            return Op(kind, after, n=rng.choice((1, 2, 3, 4, 5, 6, 8, 10, 15)), is_after=rng.random() < 0.5)
        case "poison":
            return Op(kind, after, n=rng.randint(1, 4))
        case "retry all":
            return Op("retry", after, 1.0)
        case "signal":
            return Op(kind, after, pick, what=rng.choice(SIGNALS))
        case "deploy":
            return Op(kind, after, n=rng.randrange(1000), what=f"{rng.choice(EDITS)} {rng.choice(places)}")
        case "fork":
            return Op(kind, after, pick, n=rng.randrange(1000), what=rng.choice(("", "", "take over")))
    return Op(kind, after, pick)


# From here on: what a deploy changes.


def edited(version: Version, edit: str, number: int) -> Version:
    """The code after this edit, the `number`-th deploy."""
    how, _, at = edit.rpartition(" ")
    node = next((each for each in all_nodes(version.nodes) if each.at == at), None)
    if how == "append" or node is None:
        return replace(version, nodes=(*version.nodes, _new_payment(f".n{number}"))) if how == "append" else version
    if how == "fix":
        without = rewrite(version.nodes, lambda nodes: tuple(each for each in nodes if each.kind not in ("bug", "refuse")))
        return replace(version, nodes=without)
    changed = replace(version, nodes=rewrite(version.nodes, lambda nodes: _edited_at(nodes, at, how, number)))
    if how.startswith("retire") and node.kind in ("pay", "map") and not node.scope:
        return retiring(changed, [node.key], undoes=how == "retire with")
    return changed


def retiring(version: Version, keys: Iterable[str], *, undoes: bool) -> Version:
    """The code that says of these keys that it has them no more."""
    return replace(version, retired=(*version.retired, *keys), undoes_retired=version.undoes_retired or undoes)


def _edited_at(nodes: tuple[Node, ...], at: str, how: str, number: int) -> tuple[Node, ...]:
    place = next((index for index, node in enumerate(nodes) if node.at == at), None)
    if place is None:
        return nodes
    before, node, after = nodes[:place], nodes[place], nodes[place + 1 :]
    match how:
        case "insert":
            return (*before, _new_payment(f"{at}n{number}"), node, *after)
        case "rename":
            return (*before, replace(node, key=f"{node.key}'", aliases=()), *after)
        case "alias" if node.kind in ("pay", "check", "map"):
            return (*before, replace(node, key=f"{node.key}'", aliases=(*node.aliases, node.key)), *after)
        case "remove" | "retire" | "retire with":
            return (*before, *after)
        case "unask" | "ask" if node.kind in ("pay", "map", "child", "each"):
            return (*before, replace(node, asked=how == "ask"), *after)
        case "swap":
            return (*before, *after[:1], node, *after[1:])
    return nodes


def _new_payment(at: str) -> Node:
    return Node("pay", at, f"k{at}", asked=True)

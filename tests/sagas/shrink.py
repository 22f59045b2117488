"""Cutting a program down while it still fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.sagas.programs import Node, Program, all_nodes, rewrite

# Simpler values of a node's fields, each tried alone.
_SIMPLER: dict[str, object] = {
    "plain": False,
    "once": False,
    "tries": 1,
    "fails": 0,
    "hangs": 0,
    "caught": False,
    "keyed": "told",
    "undo_fails": 0,
    "undo_late": False,
    "undo_tries": 1,
    "scope": "",
    "asked": False,
    "seconds": 0.5,
}


def shrunk(program: Program, still_fails: Callable[[Program], bool], most: int = 400) -> Program:
    """The smallest program that was found to fail, after so many tries at most."""
    tries = 0
    is_smaller = True
    while is_smaller and tries < most:
        is_smaller = False
        for smaller in _smaller(program):
            tries += 1
            if still_fails(smaller):
                program, is_smaller = smaller, True
                break
            if tries >= most:
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    for index in range(len(program.ops)):
        yield replace(program, ops=program.ops[:index] + program.ops[index + 1 :])
    if len(program.starts) > 1:
        yield from (replace(program, starts=(start,)) for start in program.starts)
    if any(start.deadline is not None for start in program.starts):
        yield replace(program, starts=tuple(replace(start, deadline=None) for start in program.starts))
    for node in all_nodes(program.version.nodes):
        yield from (_with(program, node, new) for new in _simpler(node))
    if program.max_attempts != 10:
        yield replace(program, max_attempts=10)
    if program.grace:
        yield replace(program, grace=0.0)


def _simpler(node: Node) -> Iterator[tuple[Node, ...]]:
    """What may stand in place of a node."""
    yield ()
    yield from node.branches
    if len(node.branches) > 2:
        for index in range(len(node.branches)):
            yield (replace(node, branches=node.branches[:index] + node.branches[index + 1 :]),)
    for name, value in _SIMPLER.items():
        if getattr(node, name) != value and (name != "seconds" or node.seconds):
            yield (replace(node, **{name: value}),)  # type: ignore[arg-type]  # a value of that field


def _with(program: Program, old: Node, new: tuple[Node, ...]) -> Program:
    """The program with other nodes in place of one."""

    def change(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        return tuple(each for node in nodes for each in (new if node.at == old.at else (node,)))

    return replace(program, version=replace(program.version, nodes=rewrite(program.version.nodes, change)))

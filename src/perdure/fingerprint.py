"""The hash of a workflow's definition: the same when the code means the same, on every machine, whatever its comments and layout.

Taken over the syntax tree of the function without docstrings. Functions it calls are not part of it. A function without source
(typed into a console, made by exec) has no hash, and nothing is compared.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Callable
from typing import Any, Final

# Which way of hashing it is: hashes of different schemes are not compared.
SCHEME: Final = "ast1:"


def definition_hash(fn: Callable[..., Any]) -> str | None:
    """The hash of the function's code, or None when its source cannot be had."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(fn)))
    except (OSError, TypeError, SyntaxError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.decorator_list = []
    return SCHEME + hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:32]


def is_changed(recorded: str | None, current: str | None) -> bool:
    """Whether two hashes say that the code is another; two of different schemes say nothing."""
    if recorded is None or current is None or recorded.partition(":")[0] != current.partition(":")[0]:
        return False
    return recorded != current

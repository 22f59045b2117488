"""docs/logging.md lists every message that the code logs, with its level, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
LEVELS: Final = ("debug", "info", "warning", "error")


def messages_in(source: str) -> Iterator[tuple[str, str]]:
    """The level and the format of each message that this module logs. `log.log` decides on the level as it runs."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name, logger = node.func.attr, node.func.value
        if name not in (*LEVELS, "log") or not isinstance(logger, ast.Name) or logger.id not in ("log", "logger", "_logger"):
            continue
        message = node.args[1 if name == "log" else 0]
        assert isinstance(message, ast.Constant), f"a message that is no text: {ast.unparse(node)}"
        assert isinstance(message.value, str)
        yield "varies" if name == "log" else name.upper(), message.value


def test_the_table_of_messages_is_that_of_the_code() -> None:
    logged = {pair for path in (ROOT / "src/perdure").rglob("*.py") for pair in messages_in(path.read_text())}
    page = (ROOT / "docs/logging.md").read_text().partition("## Messages")[2]
    listed = set(re.findall(r"^\| (\w+) \| `(.+?)` \|", page, re.MULTILINE))
    assert listed == logged

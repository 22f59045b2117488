"""The names of the tables, and templates filled with them: the one place where a name becomes part of SQL.

SQL in this package is written as templates (see `dialect`) made of constants only; whatever comes from outside is a bound value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

from perdure.backends.sql.dialect import Dialect
from perdure.backends.sql.values import Values

TABLES: Final = ("runs", "steps", "signals", "queues", "schedules", "items", "meta", "snapshots")
_INDEXES: Final = (
    "runs_wake",
    "runs_due",
    "runs_leased",
    "runs_changed",
    "runs_of_workflow",
    "signals_identity",
    "signals_waiting",
    "snapshots_due",
)
_NAME: Final = re.compile(r"\$([a-z_]+)")
_PLACE: Final = re.compile(r"\?(\d+)(?::(int|texts?))?")
_IDENTIFIER: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Statement(NamedTuple):
    """SQL as the database takes it, and the values in the order of its placeholders."""

    sql: str
    values: tuple[Any, ...] = ()


class _Filled(NamedTuple):
    sql: str
    order: tuple[int, ...]


class Tables:
    """The tables under one stem, in one dialect: fills templates."""

    def __init__(self, stem: str, dialect: Dialect, values: Values) -> None:
        longest = dialect.longest_stem
        is_word = isinstance(stem, str) and _IDENTIFIER.fullmatch(stem) is not None and len(stem) <= longest
        if not is_word or stem.lower().startswith("sqlite_"):
            raise ValueError(f"table {stem!r} must be letters, digits and '_', at most {longest}, and not begin with a digit")
        self.stem = stem
        self.dialect = dialect
        self.values = values
        quote = dialect.quote
        names = {part: f"{quote}{stem}_{part}{quote}" for part in (*TABLES, *_INDEXES)}
        words = {word: _NAME.sub(lambda found: names[found[1]], sql) for word, sql in dialect.words.items()}
        self._words = {**words, **names, "key": f"{quote}key{quote}"}
        self._fill: Callable[[str], _Filled] = lru_cache(maxsize=1000)(self._fill_anew)

    def sql(self, template: str) -> str:
        """The template as SQL, for values that are given in the order of its placeholders."""
        return self._fill(template).sql

    def statement(self, template: str, *values: Any) -> Statement:
        """The statement for these values: `str` is a name, `bytes` is a payload."""
        sql, order = self._fill(template)
        stored = [self._stored(value) for value in values]
        return Statement(sql, tuple(stored[place] for place in order))

    def _stored(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.values.name(value)
        if isinstance(value, bytes):
            return self.values.payload(value)
        return int(value) if isinstance(value, bool) else value

    def _fill_anew(self, template: str) -> _Filled:
        sql = _NAME.sub(lambda found: self._words[found[1]], template)
        places: list[int] = []
        is_numbered = self.dialect.placeholder(1) != self.dialect.placeholder(2)

        def put(found: re.Match[str]) -> str:
            place = int(found[1]) - 1
            if not is_numbered:
                places.append(place)
                return self.dialect.placeholder(place)
            if place not in places:
                places.append(place)
            return self.dialect.placeholder(places.index(place) + 1) + self.dialect.types.get(found[2] or "", "")

        return _Filled(_PLACE.sub(put, sql), tuple(places))


def in_pieces(rows: Sequence[Any], size: int) -> list[Sequence[Any]]:
    """The rows in lists of at most `size`: a statement takes only so many values."""
    return [rows[start : start + size] for start in range(0, len(rows), size)]

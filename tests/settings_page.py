"""The settings on docs/running.md: `python -m tests.settings_page` (`make pages`) writes them there from the code.

The names and defaults are those of the signatures. The meanings are lines of the docstrings, such as "- `path`: the file", of
the function or class itself, or of the module `perdure.stores` for what all stores have in common.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from perdure import stores
from perdure.model.durations import MICROSECOND
from perdure.options import EngineSettings, Options
from perdure.runtime import Runtime, Tuning

PAGE: Final = Path(__file__).parent.parent / "docs" / "running.md"
BEGIN: Final = "<!-- settings begin: written by tests/settings_page.py -->"
END: Final = "<!-- settings end -->"
LINE: Final = re.compile(r"^ *- `(\w+)`: (.+?)(?=^ *- `|^ *$|\Z)", re.MULTILINE | re.DOTALL)
# What an option with the default None stands for, where the signature cannot say it.
_ENGINE: Final = EngineSettings()
_TUNING: Final = {
    "unload_grace": f"{_ENGINE.unload_grace // MICROSECOND} s",
    "max_attempts": str(_ENGINE.max_attempts),
    "drain_after": f"{_ENGINE.drain_after:g} s",
    "cancel_grace": f"{_ENGINE.cancel_grace:g} s",
    "max_blocked": f"{_ENGINE.max_blocked:g} s",
    "clock": "the system's",
}


class Setting(NamedTuple):
    """An option, its default as the page shows it, and what it means."""

    name: str
    default: str
    meaning: str


def tables() -> str:
    """All settings, in Markdown."""
    parts = ["### Runtime", _table(runtime_settings())]
    for name in stores.__all__:
        if name != "open_store":
            parts += [f"### stores.{name}", _table(store_settings(name))]
    return "\n\n".join(parts)


def runtime_settings() -> list[Setting]:
    """The options of `Runtime`."""
    meanings = meanings_in(Runtime.__doc__)
    settings = [
        Setting(name, _runtime_default(name, default), _meaning(name, "Runtime", meanings))
        for name, default in _parameters(Runtime.__init__)
    ]
    meanings = meanings_in(Tuning.__doc__)
    return settings + [Setting(name, _TUNING[name], _meaning(name, "Tuning", meanings)) for name in Tuning.__annotations__]


def store_settings(name: str) -> list[Setting]:
    """The options of one function of `perdure.stores`."""
    make = getattr(stores, name)
    meanings = meanings_in(stores.__doc__) | meanings_in(make.__doc__)
    where = f"stores.{name}, or of the module"
    return [Setting(option, _shown(default), _meaning(option, where, meanings)) for option, default in _parameters(make)]


def meanings_in(docstring: str | None) -> dict[str, str]:
    """What a docstring says of each option."""
    return {name: " ".join(meaning.split()) for name, meaning in LINE.findall(inspect.cleandoc(docstring or "") + "\n")}


def _parameters(function: Any) -> Iterator[tuple[str, Any]]:
    for name, parameter in inspect.signature(function).parameters.items():
        if name != "self" and parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            yield name, parameter.default


def _meaning(name: str, where: str, meanings: Mapping[str, str]) -> str:
    if name not in meanings:
        raise LookupError(f"the docstring of {where} does not say what {name}= means; add a line: - `{name}`: ...")
    return meanings[name]


def _runtime_default(name: str, default: Any) -> str:
    if default is None and isinstance(found := getattr(Options(), name, None), str):
        return f'`"{found}"`'
    return f"{default:g} s" if name == "lease_ttl" else _shown(default)


def _shown(default: Any) -> str:
    if default is inspect.Parameter.empty:
        return "required"
    return "" if default in (None, "", ()) else f'`"{default}"`' if isinstance(default, str) else f"`{default}`"


def _table(settings: list[Setting]) -> str:
    rows = [f"| `{each.name}` | {each.default} | {each.meaning} |" for each in settings]
    return "\n".join(["| option | default | meaning |", "|---|---|---|", *rows])


def with_settings(page: str) -> str:
    """The page with the settings between its marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page needs the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_settings(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

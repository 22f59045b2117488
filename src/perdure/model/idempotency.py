"""Idempotency keys: the text that a step's function hands to a service, so that it tells a repeated request from a new one.

A key names one execution of a step: `run/step`. If the run has started over with `ctx.continue_as`, its part says how often:
`run;generation=2/step`. If the step was undone and is done again, the key ends in the number of undoings: `run/step~1`. How
often a step was undone follows from the journal, because what a retry sets aside stays there as history.

No two steps share a key: `%`, `/`, `~` and `;` are escaped in the id of the run and in the step's key. The key of a step in a
scope is recorded as `/scope/step`, with its parts escaped, so it keeps its slashes.

A step that records its intent keeps the key that it was called with there, and so does what undoes it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from perdure.errors import COMPENSATION_PREFIX
from perdure.model.journal import Intent

_ESCAPED: Final = re.compile("[%/~;]")
# What is left to escape in a key that is recorded with escapes: such a key begins with / or %.
_LEFT_TO_ESCAPE: Final = re.compile("[~;]")


class IdempotencyKeys:
    """The idempotency keys of one run's steps."""

    def __init__(self, run_id: str, generation: int, intents: dict[str, Intent], undone: Mapping[str, int]) -> None:
        self._run = run_id if _ESCAPED.search(run_id) is None else _escape(_ESCAPED, run_id)
        if generation:
            self._run += f";generation={generation}"
        # By the keys of their steps; a step that is called adds its own.
        self.intents = intents
        self.undone = undone

    def of(self, key: str, names: Sequence[str] = ()) -> str:
        """Return the key of the execution of a step that is under way, or the next one.

        `names` are all keys of a step that was renamed, the oldest first.
        """
        if self.intents and (intent := self.intents.get(key)) is not None:
            return intent.idempotency_key
        name = names[0] if names else key
        left = _LEFT_TO_ESCAPE if name[0] in "/%" else _ESCAPED
        text = f"{self._run}/{name if left.search(name) is None else _escape(left, name)}"
        if not self.undone:
            return text
        undone = sum(self.undone.get(each, 0) for each in {key, *names})
        return f"{text}~{undone}" if undone else text


def key_of_undoing(idempotency_key: str) -> str:
    """Return the key of what undoes the execution with this key: the same for every attempt to undo it."""
    run, _, step = idempotency_key.partition("/")
    return f"{run}/{COMPENSATION_PREFIX}{step}"


def _escape(escaped: re.Pattern[str], text: str) -> str:
    return escaped.sub(lambda found: f"%{ord(found[0]):02X}", text)

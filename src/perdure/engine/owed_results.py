"""What a replay owes to the journal: the recorded results that unchanged code asks for again.

While some of them were not asked for, nothing new begins, and the run does not end: code that was changed might repeat an effect
under another key, or forget one. A body that rests at something new, or has ended, while results are missing has diverged from
its journal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable

from perdure.errors import COMPENSATION_PREFIX
from perdure.model.journal import Entry, JournalIndex


class OwedResults:
    """The results that the body of one drive has not asked for so far, without those under `retired` keys or names."""

    def __init__(self, recorded: JournalIndex, retired: Collection[str], on_none_missing: Callable[[], None]) -> None:
        self._retired = retired
        # Recorded keys that the body has not asked for so far, owed or not.
        self.unasked = {entry.key for entry in recorded.closes if entry.key not in retired and entry.name not in retired}
        # Those of them that came with a snapshot or a resume state.
        closes = recorded.closes
        self._imported = {each.key for each in closes if not each.epoch or each.kind == "foreign"} if closes else set()
        # Results that must be asked for before anything new begins.
        self.missing = recorded.owed
        # Results that are owed once the step with this key, which something outside the journal cancelled, is cancelled again.
        self._after_cancel = recorded.owed_after
        for segment in (self.missing, *(followed for _, followed in self._after_cancel)):
            for entry in [each for each in segment.values() if each.key in retired or each.name in retired]:
                del segment[entry.key]
        self._cancelled_again: Counter[str] = Counter()
        self.on_none_missing = on_none_missing
        # Called when the run may end, while the end of its function waits for that.
        self.on_may_end: Callable[[], None] | None = None

    def ask(self, key: str) -> None:
        """The body asks for this key."""
        self.unasked.discard(key)
        if self.missing.pop(key, None) is not None and (not self.missing or self.on_may_end is not None):
            self._look()

    def expect(self, keys: Iterable[str]) -> None:
        """The body asks for these keys, now or, as `ctx.map` does, some of them later."""
        for key in keys:
            self.missing.pop(key, None)
            for _, followed in self._after_cancel:
                followed.pop(key, None)
        self._look()

    def expect_nothing(self) -> None:
        """The body may go another way from here than it went before, and rightly so."""
        self._after_cancel.clear()
        if self.missing:
            self.missing.clear()
            self._look()

    def expect_open(self, opened: Iterable[Entry]) -> None:
        """Unchanged code would ask for what was begun here as well."""
        retired = self._retired
        self.missing.update((entry.key, entry) for entry in opened if entry.key not in retired and entry.name not in retired)

    def _look(self) -> None:
        if not self.missing:
            self.on_none_missing()
        if self.on_may_end is not None and not self.missing_at_end():
            self.on_may_end()

    def note_cancelled_again(self, key: str) -> None:
        """This replay has cancelled the step as well, so it goes the same way: what came after the step is owed from now on."""
        if not self._after_cancel:
            return
        self._cancelled_again[key] += 1
        while self._after_cancel and self._cancelled_again[self._after_cancel[0][0]]:
            cancelled, followed = self._after_cancel.pop(0)
            self._cancelled_again[cancelled] -= 1
            self.missing.update((key, entry) for key, entry in followed.items() if key in self.unasked)

    def missing_keys(self) -> list[str]:
        """The keys of the missing results, in journal order."""
        return sorted(self.missing, key=lambda key: self.missing[key].seq)

    def missing_at_end(self) -> list[str]:
        """As `missing_keys`, where the function has ended. Compensations come after that."""
        return [key for key in self.missing_keys() if not key.startswith(COMPENSATION_PREFIX)] if self.missing else []

    def unknown(self) -> set[str]:
        """Return the imported keys that the body has not asked for."""
        return self.unasked & self._imported

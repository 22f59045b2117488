"""The next entry of the journal, and the call of the body that gets it. A state machine without asyncio.

A body is a function of its input and of the entries that were delivered to it, in their order. So an entry is delivered when it
is the next one, the store has it, and a call of the body has asked for it: on the first run as on every replay. Entries that no
body sees (what was begun, when a step is tried again) belong to the call that they are about.

A call goes through three states: it *asks*; at the next rest it is *settled*, so the body has come to wait for it, and it may
start; and its entry is *delivered*. A call may be *withdrawn* before that.

The next entry may be one that nobody asks for: the code has changed, or a task of the body is busy with its own I/O and will
ask later. The drive knows how long to wait for that. Then the entry is *passed over*: it stays known by its key, and is delivered
if a call asks for it after all. If unchanged code would have asked for it, it is *missing*, and nothing new may begin: code that
was changed might repeat an effect under another key.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from itertools import islice
from typing import Final, Generic, Literal, TypeAlias, TypeVar

import msgspec

from perdure.errors import COMPENSATION_PREFIX
from perdure.model.journal import Entry, Kind

# What the body is to be given at this rest: the entry for a call; a timer that has fired; the cancellation of the run. Or why
# there is nothing: the store does not have the next entry yet; nobody has asked for it; the journal is used up.
What: TypeAlias = Literal["deliver", "timer", "cancellation", "unacknowledged", "unasked", "used up"]


# So many calls are started before the host may have its turn.
STARTED_TOGETHER: Final = 16


class AskingCall:
    """A call of the body, as far as the journal is concerned."""

    __slots__ = ("is_cancelled", "is_settled", "is_withdrawn", "key", "kind", "opened")

    def __init__(self, key: str, kind: Kind) -> None:
        self.key = key
        self.kind: Kind = kind
        # Its entries before its result.
        self.opened: list[Entry] = []
        self.is_settled = False
        self.is_withdrawn = False
        # Whether the body has cancelled it, and waits for its end.
        self.is_cancelled = False


C = TypeVar("C", bound=AskingCall)


class Next(msgspec.Struct, Generic[C]):
    """The next entry, and the call that it is for."""

    what: What
    entry: Entry | None = None
    call: C | None = None


class JournalCursor(Generic[C]):
    """The place in the journal of one run that its body has come to."""

    def __init__(
        self,
        entries: Iterable[Entry],
        *,
        has_store: bool = True,
        owed: Collection[int] = (),
        undone_results: Iterable[Entry] = (),
        owed_after: Iterable[Entry] = (),
        retired: Collection[str] = (),
    ) -> None:
        # Recorded and neither delivered nor passed over, in order.
        self.entries = deque(entries)
        # The highest seq that the store has. Without a store there is none to wait for.
        self.acknowledged = sys.maxsize if not has_store else self.entries[-1].seq if self.entries else 0
        # The calls that wait for an entry, by key, in the order in which they were made.
        self.asked: dict[str, C] = {}
        # Those that are not settled, and those that are, and were not started.
        self.unsettled: list[C] = []
        self.settled: dict[C, None] = {}
        # Settled calls whose opening was not passed, by key.
        self._unopened: dict[str, deque[C]] = {}
        # How many calls of each key were withdrawn whose cancellation was not passed.
        self._withdrawn: Counter[str] = Counter()
        # The keys of calls that were withdrawn, settled or not: their results are not missing.
        self._given_up: set[str] = set()
        # Passed over, by key; and those of them that unchanged code asks for.
        self._loose: dict[str, deque[Entry]] = {}
        self.missing: dict[str, Entry] = {}
        self._owed = owed
        # Results that were undone, and entries that are owed as soon as the steps before them have returned the same again.
        self._undone_results = deque(undone_results)
        self._owed_after = deque(owed_after)
        self._owed_again: set[int] = set()
        self._retired = retired
        # What each key stands for.
        self.kinds: dict[str, Kind] = {entry.key: entry.kind for entry in self.entries}
        self._dangling = _dangling(self.entries)
        # Whether unchanged code asks for waits that were begun, too.
        self.owes_waits = False
        # The last opening of each key.
        self.openings: dict[str, Entry] = {}
        # Calls that get what another one gets, after that, and those that are to get it next.
        self._followers: dict[C, list[C]] = {}
        self._following: deque[tuple[Entry, C]] = deque()
        # The instant of the last entry that was delivered, and its seq; and how many calls the body has made.
        self.last_at = 0
        self.last_seq = 0
        self.calls_made = 0

    # What a call does.

    def is_next(self, key: str) -> bool:
        """Return whether the next entry is the result of this key, and no call waits for another one."""
        entries = self.entries
        if not entries or self.asked or self.unsettled:
            return False
        entry = entries[0]
        return entry.key == key and entry.phase == "close" and entry.seq <= self.acknowledged and not self._loose

    def take(self) -> Entry:
        """Return the next entry: it is delivered."""
        self.calls_made += 1
        entry = self.entries.popleft()
        self._note_delivery(entry)
        return entry

    def ask(self, call: C) -> None:
        """A call of the body waits for the entry of its key."""
        self.calls_made += 1
        self.asked[call.key] = call
        self.unsettled.append(call)
        if self.missing:
            self.missing.pop(call.key, None)

    def follow(self, first: C, call: C) -> None:
        """Let a call, which records nothing, have what the first one gets."""
        self._followers.setdefault(first, []).append(call)

    def release_followers(self, first: C) -> list[C]:
        """Return the calls that followed this one, which gets nothing. They ask no more."""
        followers = [each for each in self._followers.pop(first, ()) if not each.is_withdrawn]
        for follower in followers:
            self.withdraw(follower)
        return followers

    def withdraw(self, call: C) -> None:
        """The call gives up. Its later entries are passed over."""
        if self.asked.get(call.key) is call:
            del self.asked[call.key]
        call.is_withdrawn = True
        self._given_up.add(call.key)
        if call.is_settled:
            self.settled.pop(call, None)
            self._withdrawn[call.key] += 1

    # What happens at a rest.

    def settle(self) -> None:
        """The body rests: what was asked since the last rest is settled."""
        for call in self.unsettled:
            if not call.is_withdrawn:
                call.is_settled = True
                self.settled[call] = None
                if self.entries:
                    self._unopened.setdefault(call.key, deque()).append(call)
        self.unsettled.clear()

    @property
    def has_unstarted(self) -> bool:
        """Return whether a call was made that was not started."""
        return bool(self.unsettled or self.settled)

    def take_settled(self) -> list[C]:
        """Return the next few calls that are to be started now, in the order in which they were made; none if there are no more.

        While something is missing, those stay of which the journal knows nothing; always those that get what was passed over.
        """
        may_start = (call for call in self.settled if not self._loose or not self._must_stay(call))
        starting = list(islice(may_start, STARTED_TOGETHER))
        for call in starting:
            del self.settled[call]
        return starting

    def _must_stay(self, call: C) -> bool:
        return call.key in self._loose or (bool(self.missing) and self.is_new(call))

    def is_new(self, call: C) -> bool:
        """Return whether the call may begin something of which the journal knows nothing. One that is cancelled only ends."""
        return not call.opened and call.key not in self._loose and not call.is_cancelled

    def new_call(self) -> C | None:
        """Return the first call that is kept back because something is missing."""
        return next((call for call in self.settled if self.is_new(call)), None)

    def look(self) -> Next[C]:
        """Return what comes next. `deliver` is taken by this; for the rest the drive calls `take_next` or `pass_over`."""
        if self._following and (found := self._next_follower()) is not None:
            return found
        if self._loose and (found := self._asked_late()) is not None:
            return found
        entries, asked = self.entries, self.asked
        while entries:
            entry = entries[0]
            if entry.seq > self.acknowledged:
                return Next("unacknowledged", entry)
            if entry.kind == "timer":
                return Next("timer", entry)
            if entry.kind == "cancel":
                return Next("cancellation", entry)
            if entry.phase == "open" or (entry.phase == "cancel" and entry.kind not in ("step", "child")):
                if not (self._pass_opening(entry) if entry.phase == "open" else self._pass_withdrawal(entry)):
                    return Next("unasked", entry)
                entries.popleft()
                continue
            call = asked.get(entry.key)
            if call is None or (entry.phase == "cancel" and not call.is_cancelled):
                return Next("unasked", entry)
            entries.popleft()
            return self._deliver(entry, call)
        return Next("used up")

    def _next_follower(self) -> Next[C] | None:
        while self._following:
            entry, follower = self._following.popleft()
            if not follower.is_withdrawn:
                self.asked.pop(follower.key, None)
                self.settled.pop(follower, None)
                return Next("deliver", entry, follower)
        return None

    def take_next(self) -> int:
        """The entry that `look` found, which belongs to no call, is delivered. Return the time of the body from now on."""
        self._note_delivery(self.entries.popleft())
        return self.last_at

    def pass_over(self) -> Entry:
        """Skip the entry that `look` found, since nobody asks for it."""
        entry = self.entries.popleft()
        is_result = entry.phase == "close" and entry.kind not in ("timer", "cancel")
        if is_result or (entry.phase == "open" and entry.kind != "timer"):
            self._loose.setdefault(entry.key, deque()).append(entry)
            self._note_missing(entry)
        return entry

    def _note_missing(self, entry: Entry) -> None:
        """Note that unchanged code would have asked for this entry, if it would."""
        is_effect = entry.kind in ("step", "child") or self.owes_waits
        is_in_doubt = entry.phase == "open" and is_effect and entry.seq in self._dangling
        if (entry.phase == "close" or is_in_doubt) and self._is_owed(entry):
            self.missing[entry.key] = entry

    def _is_owed(self, entry: Entry) -> bool:
        if (entry.seq not in self._owed and entry.seq not in self._owed_again) or entry.key in self._given_up:
            return False
        return entry.key not in self._retired and entry.name not in self._retired

    def _pass_opening(self, opening: Entry) -> bool:
        """Give what was begun to its call; False if there is none."""
        waiting = self._unopened.get(opening.key)
        call = waiting.popleft() if waiting else self.asked.get(opening.key)
        if call is None:
            return False
        self._open(call, opening)
        return True

    def _pass_withdrawal(self, entry: Entry) -> bool:
        """Pass an entry which says that a wait was given up; False if the body has not given it up."""
        if not self._withdrawn[entry.key]:
            return False
        self._withdrawn[entry.key] -= 1
        return True

    def _open(self, call: C, opening: Entry) -> None:
        call.opened.append(opening)
        self.openings[opening.key] = opening

    def _asked_late(self) -> Next[C] | None:
        """Return the first entry that was passed over and is asked for now; openings go to their calls."""
        for key in self.asked.keys() & self._loose.keys():
            loose, call = self._loose[key], self.asked[key]
            while loose and loose[0].phase == "open":
                self._open(call, loose.popleft())
            if not loose:
                del self._loose[key]
        late = self.asked.keys() & self._loose.keys()
        if not late:
            return None
        key = min(late, key=lambda key: self._loose[key][0].seq)
        entry = self._loose[key].popleft()
        if not self._loose[key]:
            del self._loose[key]
        return self._deliver(entry, self.asked[key])

    def _deliver(self, entry: Entry, call: C) -> Next[C]:
        del self.asked[entry.key]
        self.settled.pop(call, None)
        waiting = self._unopened.get(entry.key)
        if waiting and waiting[0] is call:
            waiting.popleft()
        if self._followers:
            self._following.extend((entry, follower) for follower in self._followers.pop(call, ()))
        self._note_delivery(entry)
        return Next("deliver", entry, call)

    def _note_delivery(self, entry: Entry) -> None:
        self.last_at = max(self.last_at, entry.ended_at)
        self.last_seq = max(self.last_seq, entry.seq)
        if self._undone_results and entry.seq > self._undone_results[0].seq:
            self._note_repeated(entry)

    def _note_repeated(self, entry: Entry) -> None:
        """Owe what came after an undone result if this is the same result again. Otherwise the body may go another way."""
        undone = self._undone_results[0]
        if (entry.key, entry.ok, entry.payload) != (undone.key, undone.ok, undone.payload):
            self._undone_results.clear()
            return
        self._undone_results.popleft()
        while self._owed_after and not (self._undone_results and self._undone_results[0].seq < self._owed_after[0].seq):
            owed = self._owed_after.popleft()
            self._owed_again.add(owed.seq)
            if owed in self._loose.get(owed.key, ()) and owed.key not in self.asked:
                self._note_missing(owed)

    # What the drive records.

    def append(self, entry: Entry) -> None:
        """An end of a call, a timer, or the cancellation of the run was recorded just now."""
        self.entries.append(entry)
        self.kinds.setdefault(entry.key, entry.kind)

    def replace(self, entry: Entry) -> None:
        """The store has another entry in the place of this one, which is no end if it is an opening."""
        at = next((index for index, known in enumerate(self.entries) if known.seq == entry.seq), None)
        if at is None:
            return
        if entry.phase == "close":
            self.entries[at] = entry
        else:
            del self.entries[at]

    # What may begin.

    def is_known(self, key: str) -> bool:
        """Return whether the journal has an entry of this key."""
        return key in self.kinds

    def missing_keys(self) -> list[str]:
        """Return the keys of what unchanged code would have asked for, in the order of the journal."""
        return sorted(self.missing, key=lambda key: self.missing[key].seq)

    def missing_at_end(self) -> list[str]:
        """As `missing_keys`, for a function that has ended: with what is left, and without compensations, which come later."""
        left = {entry.key: entry for entry in self.entries if entry.phase == "close" and self._is_left(entry)}
        found = {**left, **self.missing}
        return [key for key in sorted(found, key=lambda key: found[key].seq) if not key.startswith(COMPENSATION_PREFIX)]

    def _is_left(self, entry: Entry) -> bool:
        return entry.key not in self.asked and entry.kind not in ("timer", "cancel") and self._is_owed(entry)

    def expect(self, keys: Callable[[], Iterable[str]]) -> None:
        """The body asks for these keys, some of them later, as `ctx.map` does."""
        if self.missing:
            for key in keys():
                self.missing.pop(key, None)

    def unasked(self) -> Iterable[Entry]:
        """Return the results that the body has not asked for."""
        for loose in self._loose.values():
            yield from (entry for entry in loose if entry.phase == "close")
        yield from (entry for entry in self.entries if entry.phase == "close" and entry.key not in self.asked)


def _dangling(entries: Iterable[Entry]) -> set[int]:
    """Return the seqs of openings that neither a result nor a cancellation follows."""
    last: dict[str, Entry] = {}
    for entry in entries:
        last[entry.key] = entry
    return {entry.seq for entry in last.values() if entry.phase == "open"}

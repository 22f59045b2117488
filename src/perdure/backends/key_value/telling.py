"""How a parent hears of its child's end.

Child and parent are two documents. The child's says in one change that it has ended and that its parent is owed the outcome; then
the parent gets it, once for each end; then the child's says that nothing is owed any more. After a crash in between the child
is still found among what is due, and whoever finds it does the rest.
"""

from __future__ import annotations

from perdure.backends.key_value import verbs
from perdure.backends.key_value.document import Document
from perdure.backends.key_value.lanes import Lanes
from perdure.backends.key_value.place import Place
from perdure.model.records import RunRow


class Teller:
    """Who tells the parents of one place."""

    def __init__(self, place: Place, lanes: Lanes) -> None:
        self._place = place
        self._lanes = lanes

    async def tell_parent(self, run_id: str) -> None:
        """Tell the parent of an ended run of its end, if that is still to be done."""
        owed = await self._place.look(run_id, self._owed)
        if owed is None:
            return
        row, outcome = owed
        if row.parent_id is not None:
            await self._lanes.change(row.parent_id, lambda run: verbs.hear(run, row, outcome))
        await self._lanes.change(run_id, lambda run: verbs.be_quits(run, row.epoch))

    async def _owed(self, document: Document, row: RunRow) -> tuple[RunRow, bytes] | None:
        if not document.owes_parent:
            return None
        whole = await self._place.whole_row(row, document.incarnation)
        return row, whole.outcome or b""

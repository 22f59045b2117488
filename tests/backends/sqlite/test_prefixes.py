from __future__ import annotations

import sqlite3

from hypothesis import example, given
from hypothesis import strategies as st

from perdure.backends.sql.listing import after_prefix

# Few characters, chosen where encodings end and patterns begin.
TEXT = st.text(
    alphabet=st.sampled_from("aA%_*?[\\'\x01\x7f\x80\u07ff\u0800\ud7ff\ue000\uffff\U00010000\U0010fffe\U0010ffff"), max_size=5
)
LAST = "\U0010ffff"


@given(prefix=TEXT, text=TEXT)
@example(prefix="\ud7ff", text="\ud7ff" + LAST)
@example(prefix="\ud7ff", text="\ue000")
@example(prefix=LAST, text=LAST + LAST)
@example(prefix="a" + LAST, text="b")
def test_the_range_of_a_prefix_holds_exactly_what_begins_with_it(prefix: str, text: str) -> None:
    database = sqlite3.connect(":memory:")
    end = after_prefix(prefix)
    query = "SELECT t >= ?1 AND (?2 = '' OR t < ?2) FROM (SELECT ?3 AS t)"  # without an end every text above is in the range
    (inside,) = database.execute(query, (prefix, end, text)).fetchall()[0]
    database.close()
    assert bool(inside) == text.startswith(prefix)

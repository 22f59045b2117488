"""The tables of mutants stay true to the code; `make mutants` tries them."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.mutants.table import ROOT, Mutant, gone, mutants


@pytest.mark.parametrize("mutant", mutants(), ids=lambda mutant: mutant.id)
def test_every_mutant_applies_and_has_tests_or_a_reason_to_have_none(mutant: Mutant) -> None:
    assert mutant.places() == 1, (
        f"{mutant.file} has changed: give {mutant.id} the text of its guard as it stands now, or say it is gone"
    )
    assert mutant.old != mutant.new
    assert mutant.promise.endswith(".")
    assert bool(mutant.tests) != bool(mutant.equivalent)
    files = [word for word in mutant.tests if word.startswith("tests/")]
    assert bool(files) == bool(mutant.tests)
    assert [file for file in files if not (ROOT / file).is_file()] == []


def test_no_id_is_used_twice() -> None:
    ids = Counter([*(mutant.id for mutant in mutants()), *(guard.id for guard in gone())])
    assert [one for one, count in ids.items() if count > 1] == []

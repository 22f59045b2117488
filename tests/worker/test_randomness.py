import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from perdure.model.ids import random_bytes


def test_nobody_gets_what_another_got() -> None:
    with ThreadPoolExecutor(8) as threads:
        given = list(threads.map(lambda _: [random_bytes() for _ in range(500)], range(8)))
    everything = [each for one in given for each in one]
    assert len(set(everything)) == len(everything) == 4000
    assert {len(each) for each in everything} == {16}


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_gets_others_than_its_parent() -> None:
    random_bytes()  # now there are more
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(there, b"".join(random_bytes() for _ in range(200)))
        os._exit(0)
    os.close(there)
    with os.fdopen(here, "rb") as answer:
        said = answer.read()
    os.waitpid(child, 0)
    theirs = {said[start : start + 16] for start in range(0, len(said), 16)}
    assert len(theirs) == 200
    assert theirs.isdisjoint(random_bytes() for _ in range(200))

"""`python -m perdure.testing.contract [PAGE]`: the promises of the suite, printed or written into a page of the docs."""

from __future__ import annotations

import sys
from pathlib import Path

from perdure.testing.contract.pages import promises, write_promises


def main(pages: list[str]) -> None:
    """Write the promises into each page, or print them."""
    for page in pages:
        write_promises(Path(page))
    if not pages:
        sys.stdout.write(promises())


main(sys.argv[1:])

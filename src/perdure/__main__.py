"""`python -m perdure`: the command line."""

import sys

from perdure.cli import main

if __name__ == "__main__":
    sys.exit(main())

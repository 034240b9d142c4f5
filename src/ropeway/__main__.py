"""`python -m ropeway` is the `ropeway` command."""

import sys

from ropeway.cli import main

if __name__ == "__main__":
    sys.exit(main())

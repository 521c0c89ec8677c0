"""``python -m memferry_tools`` is the `memferry` command."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())

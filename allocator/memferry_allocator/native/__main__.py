"""What a compiler needs to build against libmemferry: ``python -m memferry_allocator.native --cflags --libs``."""

from __future__ import annotations

import argparse
import shlex
import sys

from ..errors import UnsupportedError
from .library import include_path, library_path


def main(arguments: list[str] | None = None) -> int:
    """Print flags on one line; 1 where the library was not built."""
    parser = argparse.ArgumentParser(prog="python -m memferry_allocator.native", description=__doc__)
    parser.add_argument("--cflags", action="store_true", help="flags for the compiler")
    parser.add_argument("--libs", action="store_true", help="flags for the linker, with a run path")
    parser.add_argument("--library", action="store_true", help="the path of the shared library")
    asked = parser.parse_args(arguments)
    if not (asked.cflags or asked.libs or asked.library):
        parser.error("ask for --cflags, --libs or --library")
    try:
        flags = [f"-I{include_path()}"] if asked.cflags else []
        if asked.libs:
            folder = library_path().parent
            flags += [f"-L{folder}", f"-Wl,-rpath,{folder}", "-lmemferry"]
        if asked.library:
            flags.append(str(library_path()))
    except UnsupportedError as error:
        print(error, file=sys.stderr)
        return 1
    print(shlex.join(flags))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Write docs/surprises.md from the tests beside this file, or check that it is as written.

python -m tests.surprises [--check]
"""

import argparse
import sys

from tests.surprises.page import PAGE, page


def main() -> int:
    """Write the page; with ``--check`` write nothing, and return 1 if it differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.surprises")
    parser.add_argument(
        "--check", action="store_true", help="say whether it differs, write nothing"
    )
    if not parser.parse_args().check:
        PAGE.write_text(page())
    elif PAGE.read_text() != page():
        print(f"{PAGE.name} differs from the tests: python -m tests.surprises", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

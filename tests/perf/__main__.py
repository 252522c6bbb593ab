"""`python tests/perf NAME …`: puts the test packages on Python's path and runs one measurement."""

import sys
from pathlib import Path

if __name__ == "__main__":
    tests = Path(__file__).resolve().parents[1]
    sys.path[:1] = [str(tests), str(tests / "support")]  # in place of tests/perf, whose modules are in a package
    from perf.harness import main

    sys.exit(main())

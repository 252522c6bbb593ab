import sys

from space_common.process import exit_on_sigterm

from space_eval.bench.command import main

if __name__ == "__main__":
    exit_on_sigterm()
    sys.exit(main())

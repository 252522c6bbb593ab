import sys

from space_eval.bench.command import main
from space_eval.bench.server_process import exit_on_sigterm

if __name__ == "__main__":
    exit_on_sigterm()
    sys.exit(main())

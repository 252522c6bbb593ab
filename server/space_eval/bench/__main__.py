import sys

from space_eval.bench.command import main
from space_eval.bench.server_process import unwind_when_told_to_end

if __name__ == "__main__":
    unwind_when_told_to_end()
    sys.exit(main())

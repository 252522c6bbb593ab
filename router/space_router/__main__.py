"""`python -m space_router` is `spaceserve`."""

import os
import sys

# `python -m` puts the current folder first on the path, so that a json.py or torch.py there would be executed in place
# of the real one. It stays only where this package itself was taken from it.
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120  # pathlib may lie there
if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()] != [_HERE]:  # noqa: PTH109
    del sys.path[0]

from space_router.cli import main  # noqa: E402

sys.exit(main())

"""`python -m space_router` is `spaceserve`."""

import sys

from space_router.cli import main

sys.exit(main())

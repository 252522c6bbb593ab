"""The progress bars of transformers while it loads weights."""

import sys

from transformers.utils import logging


def show_load_progress_on_terminals() -> None:
    """Switch transformers' bars off where stderr is a file, which they would fill with carriage returns."""
    if not sys.stderr.isatty():
        logging.disable_progress_bar()

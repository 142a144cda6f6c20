"""Keeps other libraries' progress bars and notices out of tightfit's own output."""

from __future__ import annotations

import warnings


def quiet_libraries() -> None:
    """Only errors of transformers are shown, and none of its bars."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # transformers' own calls of names that it has deprecated; nothing a user could change.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")

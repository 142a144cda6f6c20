"""Keeps other libraries' progress bars and notices out of tightfit's own output."""

from __future__ import annotations

import logging
import os
import sys
import warnings


def quiet_libraries() -> None:
    """Only errors of transformers are shown, and none of its bars.

    Where it is not imported yet it is told through its environment: not every verb needs it.
    """
    if "transformers" in sys.modules:
        from transformers.utils.logging import disable_progress_bar, set_verbosity_error

        set_verbosity_error()
        disable_progress_bar()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # bitsandbytes tells of a package that only its kernels for inference would use.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    # transformers' own calls of names that it has deprecated; nothing a user could change.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")

"""End processes that the user's code has forked and not ended, before they repeat the work of their parent."""

import os
import sys

FORKED_STATUS = 70
"""Exit status of such a process."""


def end_if_forked(process: int, culprit: str) -> None:
    """End this process at once, and say why, unless it is the one that called the user's code.

    Args:
        process: ``os.getpid()`` before the user's code was called.
        culprit: what was called, such as ``reward 'score'``.
    """
    if os.getpid() == process:
        return
    error = sys.exception()
    outcome = "returned" if error is None else f"raised {type(error).__name__}"
    message = f"{culprit} called os.fork and {outcome} in the new process too, which was ended: end it by os._exit(0)\n"
    try:
        os.write(2, message.encode("utf-8", "replace"))  # not by logging, whose lock another thread may have held
    finally:
        os._exit(FORKED_STATUS)  # at once: the handlers that this process has from its parent are for the parent's end

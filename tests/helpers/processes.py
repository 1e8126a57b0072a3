"""Programs that tests start."""

import ctypes
import signal

PR_SET_PDEATHSIG = 1


def dies_with_the_tests():
    """For `preexec_fn`: the program is killed when the process of the tests ends, also if that is killed (Linux)."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

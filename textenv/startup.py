"""The start of programs and processes of ours."""

import gc
import sys


def load_torch() -> None:
    """Import torch and TensorDict in two thirds of the time.

    Python's garbage collector would go through all that they define, again and again, also when the process ends. So it
    waits, and never looks at these objects. Only for processes that are ours: it also keeps what others have left.
    """
    if "tensordict" in sys.modules:
        return
    gc.disable()
    import tensordict  # noqa: F401  # imports torch

    gc.freeze()
    gc.enable()

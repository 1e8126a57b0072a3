"""Runs a peer's script by the processor's clock, and says how much memory its training took beyond what stood before.

PEER_PYTHON examples/benchmarks/watched_peer.py ../shared/peers/llm/peer_trl_old.py --size tiny --iters 4

``--ending P`` before the script gives its models EOS with this probability after every text.

What stood before are imports and models: the scripts that train write down the moment at which they begin, once
everything is made, in ``Recorder.start``. The processor's seconds of one thread are those of the wall, less what other
processes took.
"""

import json
import runpy
import sys
import time
from pathlib import Path

from peak_memory import PeakMemory


def watch(recorder, memory):
    """Measure from the last moment that a recorder is told to be the start."""

    def begin(self, moment):
        memory.start()
        self.__dict__["start"] = moment

    recorder.start = property(lambda self: self.__dict__["start"], begin)


if __name__ == "__main__":
    ending = float(sys.argv[2]) if sys.argv[1] == "--ending" else None
    if ending is not None:
        del sys.argv[1:3]
    script = Path(sys.argv[1])
    if not script.is_file():
        sys.exit(f"{script} does not exist: say by --peers where the peers' scripts are")
    sys.path.insert(0, str(script.parent))
    sys.argv = sys.argv[1:]
    time.perf_counter = time.process_time
    import common

    if ending is not None:
        make = common.make_model

        def make_model(*arguments, **keywords):
            from ending import end_with

            model = make(*arguments, **keywords)
            end_with(model, ending)
            return model

        common.make_model = make_model
    memory = PeakMemory()
    watch(common.Recorder, memory)
    runpy.run_path(str(script), run_name="__main__")
    if memory.standing:
        print("RESULT " + json.dumps(memory.metrics()), flush=True)

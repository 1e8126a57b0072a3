"""The first hour on a GPU: every line of docs/gpu.md, a figure or a named failure for each. ``make gpu`` runs it.

    python examples/benchmarks/first_hour.py --device cuda
    python examples/benchmarks/first_hour.py --device cpu --only devices token    # lines by name

Each line is a process of its own, so that a failure, even of CUDA itself, does not stop the others. The report goes to
``runs/gpu-report.json``, and what each line printed to ``runs/gpu-report/``. The exit status is 1 if a line failed.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = Path(__file__).parent.relative_to(ROOT)
SIMULATED = "second"
"""Device of `gpu_checks.py` on which waits are counted where there is no GPU."""
OUTSIDE_PYTHON = "called a synchronizing CUDA operation"
"""torch prints this, and gives no warning to Python, for a wait inside an operation that is written in C++."""
LEAST_ESTIMATE, LARGEST_ESTIMATE = 1 / 1.15, 1.3
"""Estimated by measured memory: `algos plan` calls a run fitting if there are 15 % more on a GPU."""


@dataclass
class Result:
    """Of a line.

    Args:
        status: "OK", "FAILED", or "needs CUDA".
        figure: what was measured, or what went wrong.
        seconds: what the line took.
        advice: what to do, or to send; empty unless it failed.
        details: more figures, by name.
    """

    line: str
    status: str
    figure: str
    seconds: float = 0.0
    advice: str = ""
    details: dict | None = None


@dataclass(frozen=True)
class Line:
    """A line of the checklist.

    Args:
        name: its name on docs/gpu.md.
        advice: what to do if it fails, besides sending the report.
        command: from the options of this script to the arguments of Python.
        read: from what the command printed, and the options, to the figure and details; it raises a `CheckError`.
        minutes: after so many the line has failed.
        only_cuda: True if nothing can be said without a GPU.
    """

    name: str
    advice: str
    command: Callable
    read: Callable
    minutes: float = 5
    only_cuda: bool = False


class CheckError(Exception):
    """What a line found wrong."""


def check(name, device=None):
    """Command of a check of `gpu_checks.py`."""

    def command(options):
        return [str(BENCHMARKS / "gpu_checks.py"), name, "--device", device_of_check(options, device)]

    return command


def device_of_check(options, without_gpu):
    """The device of the options; without a GPU the device that ``without_gpu`` names, if any."""
    if options.device == "cpu" and without_gpu is not None:
        return without_gpu
    return options.device


def read_check(output, options):
    """Figure and details of a check of `gpu_checks.py`."""
    lines = [line.removeprefix("RESULT ") for line in output.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise CheckError("the check printed no result")
    details = json.loads(lines[-1])
    return details.pop("figure"), details


def read_waits(output, options):
    """As `read_check`, with the waits that only torch's C++ has printed."""
    figure, details = read_check(output, options)
    if options.device == "cpu":
        return f"{figure}; simulated device, set_sync_debug_mode needs CUDA", details
    hidden = output.count(OUTSIDE_PYTHON)
    details["outside Python"] = hidden
    if hidden:
        raise CheckError(f"{hidden} waits inside operations written in C++, besides: {figure}")
    return figure, details


def memory(options):
    """Command of the comparison of memory; on a CPU one run of it."""
    only = ["--only", "GRPO"] if options.device == "cpu" else []
    device = "cpu" if options.device == "cpu" else "cuda"
    return [str(BENCHMARKS / "plan_check.py"), "--device", device, *only]


def read_memory(output, options):
    """Least and largest of estimated by measured memory."""
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in output.splitlines() if line[:1] == "|"]
    ratios = {row[0]: float(row[-1]) for row in rows[2:]}
    if not ratios:
        raise CheckError("no run was measured")
    wrong = {name: x for name, x in ratios.items() if not LEAST_ESTIMATE <= x <= LARGEST_ESTIMATE}
    if wrong:
        words = ", ".join(f"{name} {ratio:.2f}" for name, ratio in wrong.items())
        raise CheckError(f"estimate / measured is {words}, expected {LEAST_ESTIMATE:.2f} to {LARGEST_ESTIMATE:.2f}")
    least, largest = min(ratios.values()), max(ratios.values())
    return f"estimate / measured {least:.2f} to {largest:.2f} in {len(ratios)} runs", {"estimate / measured": ratios}


def benchmarks(options):
    """Command of the suite gpu of `run.py`."""
    return [str(BENCHMARKS / "run.py"), "--suite", "gpu", "--device", options.device, "--json", figures_file(options)]


def figures_file(options):
    """Where the suite's figures go."""
    return f"runs/gpu-{options.device}.json"


def read_benchmarks(output, options):
    """Figures of the suite; on a CPU they are none of a GPU."""
    rows = json.loads((ROOT / figures_file(options)).read_text(encoding="utf-8"))["rows"]
    words = [f"{row['case']} {row['ours']:,.4g} {row['unit']} ({row['ratio']:.2f})" for row in rows]
    note = "; in miniature, no figures of a GPU" if options.device == "cpu" else ""
    return ", ".join(words) + note, {"rows": rows}


def trainings(options):
    """Command of the trainings of tests/helpers/device_runs.py, each in turn."""
    return ["-W", "ignore", str(BENCHMARKS / "first_hour.py"), "--trainings", "--device", options.device]


def run_trainings(device):
    """Run the trainings in one process; after a failure, those that are left in another."""
    sys.path.insert(0, str(ROOT))
    from tests.helpers.device_runs import RUNS

    left = list(RUNS)
    failed = []
    while left:
        command = [sys.executable, "-W", "ignore", "-m", "tests.helpers.device_runs", device, *left]
        ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        passed = [line.removeprefix("passed ") for line in ended.stdout.splitlines() if line.startswith("passed ")]
        left = left[len(passed) :]
        if left:
            failed.append(left.pop(0))
    print("RESULT", json.dumps({"passed": len(RUNS) - len(failed), "failed": failed}))


def read_trainings(output, options):
    """Number of trainings; those that failed by name."""
    (line,) = [line for line in output.splitlines() if line.startswith("RESULT ")]
    details = json.loads(line.removeprefix("RESULT "))
    if details["failed"]:
        raise CheckError("failed: " + ", ".join(details["failed"]))
    return f"{details['passed']} trainings", details


def suite(options):
    """Command of the suite, without the trainings, which are a line of their own."""
    twice = "tests/integration/test_devices.py::test_all_parts_run_on_the_accelerator"
    workers = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
    return ["-m", "pytest", *workers, "-q", "-rsfE", "-m", "not slow", "--deselect", twice, *options.tests]


def read_suite(output, options):
    """Last line of pytest."""
    return output.strip().splitlines()[-1].strip("= "), {}


LINES = [
    Line("machine", "install the build of torch for this GPU's driver", check("machine"), read_check),
    Line("devices", "the tensor that is named stays on the wrong device", check("devices", SIMULATED), read_check),
    Line("token", "an unnamed wait slows each token", check("token", SIMULATED), read_waits),
    Line("update", "an unnamed wait slows each minibatch", check("update", SIMULATED), read_waits),
    Line("control", "an unnamed wait slows each step", check("control", SIMULATED), read_waits),
    Line("control-update", "an unnamed wait slows each minibatch", check("control-update", SIMULATED), read_waits),
    Line("graphs", "generation works without graphs, but slower", check("graphs"), read_check, only_cuda=True),
    Line("bfloat16", "train in float32 until it is mended", check("bfloat16"), read_check),
    Line("memory", "leave more room than `algos plan` says", memory, read_memory, minutes=15),
    Line("benchmarks", "another process may use the GPU (nvidia-smi)", benchmarks, read_benchmarks, minutes=15),
    Line("trainings", "leave out what is named", trainings, read_trainings, minutes=15),
    Line("compiled", "nothing in the library needs torch.compile", check("compiled"), read_check, minutes=8),
    Line("suite", "the summary at the end of the log names the tests", suite, read_suite, minutes=60),
]
"""In the order in which they run: what is quick and tells most comes first."""


def run(line, options, folder):
    """Run a line; return its `Result`, whatever happens."""
    if line.only_cuda and options.device == "cpu":
        return Result(line.name, "needs CUDA", "")
    log = folder / f"{line.name}.log"
    command = [sys.executable, *line.command(options)]
    environment = os.environ | {"TEXTENV_DEVICE": options.device}
    start = time.perf_counter()
    try:
        with log.open("w", encoding="utf-8") as file:
            print("$", shlex.join(command), file=file, flush=True)
            ended = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, timeout=60 * line.minutes
            )
        output = log.read_text(encoding="utf-8", errors="replace")
        if ended.returncode:
            raise CheckError(last_error(output))
        figure, details = line.read(output, options)
        status, advice = "OK", ""
    except subprocess.TimeoutExpired:
        status, figure, details = "FAILED", f"not done after {line.minutes:g} minutes", {}
    except Exception as error:  # a line's mistake must not stop the others
        status, figure, details = "FAILED", str(error), {}
    if status == "FAILED":
        advice = f"{line.advice}; send {os.path.relpath(log, ROOT)}"
    return Result(line.name, status, figure, round(time.perf_counter() - start, 1), advice, details)


def last_error(output):
    """The last line that names an error, else the last line."""
    lines = [line for line in output.strip().splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b|=+ .*failed", line)]
    return (errors or lines or ["it printed nothing"])[-1].strip("= ")


def sentence(result):
    """A result in one line, and what to do."""
    text = f"{result.line:15} {result.status:10} {result.figure}"
    if result.seconds:
        text += f"  [{result.seconds:.0f} s]"
    if result.advice:
        text += f"\n{'':27}{result.advice}"
    return text


def main(options):
    from page import provenance

    chosen = [line for line in LINES if not options.only or line.name in options.only]
    folder = ROOT / "runs" / "gpu-report"
    folder.mkdir(parents=True, exist_ok=True)
    report = ROOT / "runs" / "gpu-report.json"
    about = provenance("python " + shlex.join(sys.argv)) | {"device": options.device}

    # The report is written after each line, so that there is one if the machine is taken away
    results = []
    for line in chosen:
        result = run(line, options, folder)
        results.append(result)
        print(sentence(result), flush=True)
        content = about | {"lines": [asdict(x) for x in results]}
        report.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    failed = sum(result.status == "FAILED" for result in results)
    print(f"{failed} of {len(results)} lines failed. Please send {report.relative_to(ROOT)}")
    return int(failed > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1 or cpu (%(default)s)")
    parser.add_argument("--only", nargs="*", default=[], choices=[line.name for line in LINES], metavar="LINE")
    parser.add_argument("--tests", nargs="*", default=["tests"], help="files of the line suite (%(default)s)")
    parser.add_argument("--trainings", action="store_true", help=argparse.SUPPRESS)
    chosen_options = parser.parse_args()
    if chosen_options.trainings:
        run_trainings(chosen_options.device)
    else:
        sys.exit(main(chosen_options))

"""Commands ``algos`` and ``python`` that start without loading torch: a process that has loaded it already forks.

Half of what a page's short commands take is the import of other libraries, the same for each. None of our modules is
loaded before the fork, so each command reads the sources as if it were alone. ``python -m tests.helpers.warm_start
SOCKET`` is that process, and listens at the path SOCKET; it ends with the process that started it. The command that a
test starts waits for the process that was forked, so a signal must be sent to the latter (`os.getpid` in its program).
"""

import atexit
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

from tests.helpers.processes import dies_with_the_tests

ROOT = Path(__file__).parents[2]
CLIENT = """#!{python} -IS
import array, json, os, socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.connect({address!r})
streams = array.array("i", [0, 1, 2])
connection.sendmsg([b"."], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
connection.sendall(json.dumps([sys.argv, os.getcwd(), dict(os.environ)]).encode())
connection.shutdown(socket.SHUT_WR)
sys.exit(int(connection.makefile().read()))
"""


@cache
def folder_of_commands() -> str:
    """Folder with the command algos, for the beginning of PATH; the process behind it is started at the first call."""
    return str(_commands() / "bin")


def path_of_python() -> str:
    """Path of the command python, which runs a file, or a text after ``-c``."""
    return str(_commands() / "python" / "python")


def run_program(program: str, *arguments: str, folder: Path | str = ROOT, **options) -> subprocess.CompletedProcess:
    """Run the text of a Python program in a process that has loaded torch already; return its output and status.

    Args:
        program: what would be a file's text: it finds our modules, and is the module ``__main__``.
        arguments: its ``sys.argv[1:]``.
        folder: working folder.
        options: those of `subprocess.run`, such as ``env``.
    """
    command = [path_of_python(), "-c", program, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, **options)


@cache
def _commands() -> Path:
    """Folder of two folders, each with one command."""
    folder = tempfile.TemporaryDirectory(prefix="warm")
    atexit.register(folder.cleanup)
    address = Path(folder.name, "socket")
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.warm_start", str(address)], cwd=ROOT, preexec_fn=dies_with_the_tests
    )
    atexit.register(_end, server)
    while not address.exists():
        assert server.poll() is None, "what loads torch has ended: its error is above"
        time.sleep(0.05)
    for place, name in ("bin", "algos"), ("python", "python"):  # a page's own `python` is another one
        command = Path(folder.name, place, name)
        command.parent.mkdir()
        command.write_text(CLIENT.format(python=sys.executable, address=str(address)))
        command.chmod(0o755)
    return Path(folder.name)


def _end(server: subprocess.Popen[bytes]) -> None:
    """Kill the process, and wait for its end."""
    server.kill()
    server.wait()


def serve(address: str) -> None:
    """Fork for each command that asks; return in the process that is to run it."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address + ".new")
    listener.listen()
    os.rename(address + ".new", address)  # now it can be asked
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that answer
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return answer(connection)
        connection.close()


def answer(connection: socket.socket) -> None:
    """Fork again; one process returns to run the command, the other sends its exit status."""
    _, streams, _, _ = socket.recv_fds(connection, 1, 3)
    with connection.makefile() as request:
        arguments, folder, environment = json.load(request)
    command = os.fork()
    if command != 0:
        _, status = os.waitpid(command, 0)
        exit_code = os.waitstatus_to_exitcode(status)
        if exit_code < 0:  # by a signal
            exit_code = 128 - exit_code
        connection.sendall(str(exit_code).encode())
        os._exit(0)

    connection.close()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [Path(arguments[0]).name, *arguments[1:]]


if __name__ == "__main__":
    import gymnasium  # noqa: F401
    import tensordict  # noqa: F401
    import torch  # noqa: F401
    import torch._dynamo  # noqa: F401
    import transformers  # noqa: F401

    gc.freeze()  # or each collection would copy what is shared
    serve(sys.argv[1])
    name = sys.argv[0]
    if name == "python" and sys.argv[1] == "-c":
        program = sys.argv.pop(2)
        sys.argv.pop(0)
        exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
    else:
        sys.path.remove(str(ROOT))  # what ``python -m`` adds
        file = str(Path(sys.executable).parent / "algos")
        if name == "python":
            sys.argv.pop(0)
            file = sys.argv[0]
        runpy.run_path(file, run_name="__main__")

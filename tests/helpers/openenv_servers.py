"""OpenEnv servers in processes of their own, which start at once: they fork from one that has loaded the package.

``python openenv_servers.py`` is that process. Each line of its input is an order: ``["start", PROGRAM, ARGUMENT, …]``
is answered with the number of the new process, ``["wait", NUMBER]`` with its exit status when it has ended.
"""

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path


class Servers:
    """Processes that fork from one, which starts now."""

    def __init__(self):
        self.parent = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def start(self, program, *arguments, ports):
        """Run a program of tests/helpers, and wait until it listens on these ports; returns a `Server`."""
        number = self.ask("start", str(Path(__file__).with_name(program)), *map(str, arguments))
        for port in ports:
            wait_for(port)
        return Server(self, number)

    def ask(self, *order):
        self.parent.stdin.write(json.dumps(order).encode() + b"\n")
        self.parent.stdin.flush()
        return json.loads(self.parent.stdout.readline())

    def close(self):
        """End all processes."""
        self.parent.communicate()


class Server:
    """One of the processes."""

    def __init__(self, servers, number):
        self.servers = servers
        self.number = number
        self.status = None

    def kill(self):
        if self.status is None:
            os.kill(self.number, signal.SIGKILL)

    def wait(self):
        """The exit status, or minus the signal that ended it."""
        if self.status is None:
            self.status = self.servers.ask("wait", self.number)
        return self.status


def free_port():
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def wait_for(port):
    """Wait until a server listens."""
    for _ in range(1200):
        with closing(socket.socket()) as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise AssertionError("the server did not start")


def main():
    import fastmcp  # noqa: F401
    import openenv.core.env_server.mcp_environment  # noqa: F401
    import uvicorn  # noqa: F401

    running = set()
    for line in sys.stdin:
        order, *words = json.loads(line)
        if order == "wait":
            _, status = os.waitpid(words[0], 0)
            running.remove(words[0])
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        number = os.fork()
        if number == 0:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # or it would read the orders
            os.dup2(2, 1)
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
            return
        running.add(number)
        print(number, flush=True)
    for number in running:
        os.kill(number, signal.SIGKILL)


if __name__ == "__main__":
    main()

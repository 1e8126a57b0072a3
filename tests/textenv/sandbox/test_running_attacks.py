"""What an answer may try against this machine and against its verdict. Each attack works without the sandbox."""

import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest

from tests.helpers.sandbox import closed_or_skip
from textenv.sandbox.running import CodeTester

SECRET = "the combination is 4711"


@pytest.fixture(scope="module")
def closed():
    closed_or_skip()
    return CodeTester(seconds=5, memory_mb=1024, unsafe=False)


@pytest.fixture(scope="module")
def unsafe():
    return CodeTester(seconds=5, memory_mb=1024, unsafe=True)


@pytest.fixture
def secret(tmp_path, tmp_path_factory, monkeypatch):
    """A file outside; the folders of answers are on the same disk, or links and moves would fail by themselves."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path_factory.mktemp("scratch")))
    path = tmp_path / "secret.txt"
    path.write_text(SECRET)
    return path


def functions(attacks, parameters):
    """A function `f0`, `f1`, … for each attack: the processes of an answer start once for all of them."""
    return "".join(f"\ndef f{i}({parameters}): return {attack}" for i, attack in enumerate(attacks))


def that_pass(tester, code, tests):
    """The names whose tests pass: all are run in one go, and each alone if some pass or the code has not lived on."""
    passed = tester.count_passed(code, [*tests.values(), "pass"])
    if passed in (1, len(tests) + 1):
        return set(tests) if passed > 1 else set()
    return {name for name, test in tests.items() if tester.count_passed(code, [test])}


READING = {
    "plainly": "open(path).read()",
    "by a link in the folder": "os.symlink(path, 'link') or open('link').read()",
    "by a hard link": "os.link(path, 'hard link') or open('hard link').read()",
    "by moving it here": "os.rename(path, 'moved') or open('moved').read()",
    "from above": "open('../' * 20 + path).read()",
    "by the folder": "str(os.listdir(os.path.dirname(path))) and open(os.open(path, os.O_RDONLY)).read()",
    "by a file descriptor of the folder": "open(os.open('secret.txt', 0, dir_fd=os.open(os.path.dirname(path), 0)))"
    ".read()",
    "by the C library": "libc_read(path)",
    "by another program": "subprocess.check_output(['cat', path], text=True)",
    "by a fork": "os.popen('cat ' + path).read()",
    "by mapping it": "mmap.mmap(os.open(path, 0), 0, prot=mmap.PROT_READ)[:].decode()",
    "by the import system": "importlib.machinery.SourceFileLoader('x', path).get_data(path).decode()",
    "by a thread": "next(concurrent.futures.ThreadPoolExecutor(1).map(lambda p: open(p).read(), [path]))",
}
PREAMBLE = """
import concurrent.futures, ctypes, importlib.machinery, mmap, os, socket, subprocess, sys
libc = ctypes.CDLL(None, use_errno=True)
def libc_read(path):
    file = libc.open(path.encode(), 0)
    data = ctypes.create_string_buffer(1000)
    length = libc.read(file, data, 1000)
    return data.raw[:length].decode()
"""


def test_no_file_outside_is_read(closed, unsafe, secret):
    """Each attack has a file of its own."""
    code, tests = PREAMBLE + functions(READING.values(), "path"), {}
    for i, name in enumerate(READING):
        path = secret.parent / str(i) / secret.name
        path.parent.mkdir()
        path.write_text(SECRET)
        tests[name] = f"assert {SECRET!r} in f{i}({str(path)!r})"
    assert that_pass(closed, code, tests) == set()
    assert {path.read_text() for path in secret.parent.glob("*/*")} == {SECRET}
    assert len([*secret.parent.glob("*/*")]) == len(READING)
    assert that_pass(unsafe, code, tests) == set(READING)


WRITING = {
    "overwriting": "open(path, 'w').write('x')",
    "appending": "open(path, 'a').write('x')",
    "truncating by name": "os.truncate(path, 0)",
    "truncating while reading": "os.open(path, os.O_RDONLY | os.O_TRUNC)",
    "removing": "os.remove(path)",
    "moving away": "os.rename(path, path + '2')",
    "replacing": "open('x', 'w').close() or os.rename('x', path)",
    "a mode": "os.chmod(path, 0)",
    "times": "os.utime(path, (0, 0))",
    "an attribute": "os.setxattr(path, 'user.x', b'x')",
    "a file beside it": "open(path + '2', 'w')",
    "a link beside it": "os.symlink('x', path + '2')",
    "a folder beside it": "os.mkdir(path + '2')",
    "by another program": "os.system('rm ' + path)",
}


def state_of(folder):
    entries = sorted(folder.iterdir())
    statuses = [entry.lstat() for entry in entries]
    return [
        (e.name, s.st_mode, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for e, s in zip(entries, statuses, strict=True)
    ]


def test_nothing_outside_is_changed(closed, unsafe, secret):
    """Each attack has a file of its own."""
    attacks = dict(WRITING)
    try:
        os.setxattr(secret, "user.y", b"y")
    except OSError:
        del attacks["an attribute"]
    code, tests, before = PREAMBLE + functions(attacks.values(), "path"), {}, {}
    for i, name in enumerate(attacks):
        path = secret.parent / str(i) / secret.name
        path.parent.mkdir()
        path.write_text(SECRET)
        tests[name] = f"f{i}({str(path)!r})"
        before[name] = path.parent, state_of(path.parent)
    assert closed.count_passed(code, [f"try: {test}\nexcept OSError: pass" for test in tests.values()]) == len(tests)
    assert [name for name, (folder, state) in before.items() if state_of(folder) != state] == []
    assert that_pass(unsafe, code, tests) == set(tests)
    assert [name for name, (folder, state) in before.items() if state_of(folder) == state] == []
    if "an attribute" not in attacks:
        pytest.skip("this disk has no attributes of files; all other attacks failed, as they should")


def test_python_itself_is_not_opened_for_writing(closed):
    code = "import json.tool as m\ndef f(mode): open(m.__file__, mode)"
    assert closed.count_passed(code, ["f('a')"]) == 0
    assert closed.count_passed(code, ["f('r')"]) == 1


def test_no_variables_of_the_environment(closed, monkeypatch):
    monkeypatch.setenv("A_KEY", SECRET)
    code = f"""
import os
def f():
    everything = str(os.environ)
    for process in ("self", {os.getpid()}, os.getppid()):
        try: everything += open(f"/proc/{{process}}/environ").read()
        except OSError: pass
    return everything
"""
    assert closed.count_passed(code, [f"assert {SECRET!r} in f()"]) == 0
    assert closed.count_passed(code, ["assert 'HOME' in f()"]) == 1


CONNECTING = {
    "TCP": "socket.create_connection(tcp, 5)",
    "UDP": "socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', udp)",
    "a Unix socket": "socket.socket(socket.AF_UNIX).connect(unix)",
    "an abstract Unix socket": "socket.socket(socket.AF_UNIX).connect(chr(0) + abstract)",
    "a pair of datagram sockets": "socket.socketpair(type=socket.SOCK_DGRAM)[0].connect(unix_datagrams)",
    "a server": "socket.create_server(('127.0.0.1', 0))",
}


def test_no_network_and_no_sockets_of_this_machine(closed, unsafe, tmp_path):
    abstract = f"textenv-{os.getpid()}"
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(type=socket.SOCK_DGRAM) as udp,
        socket.socket(socket.AF_UNIX) as unix,
        socket.socket(socket.AF_UNIX) as hidden,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams,
    ):
        udp.bind(("127.0.0.1", 0))
        unix.bind(str(tmp_path / "s"))
        unix.listen()
        hidden.bind("\0" + abstract)
        hidden.listen()
        datagrams.bind(str(tmp_path / "d"))
        names = dict(tcp=tcp.getsockname(), udp=udp.getsockname(), unix=unix.getsockname(), abstract=abstract)
        names["unix_datagrams"] = datagrams.getsockname()
        code = f"import socket\nglobals().update({names!r})" + functions(CONNECTING.values(), "")
        tests = {name: f"f{i}()" for i, name in enumerate(CONNECTING)}
        assert that_pass(closed, code, tests) == set()
        assert that_pass(unsafe, code, tests) == set(CONNECTING)


HARMING = {
    "kill": "os.kill(victim, 9)",
    "the system call": "libc.syscall({'x86_64': 62, 'aarch64': 129}[os.uname().machine], victim, 9)",
    "tgkill": "libc.syscall({'x86_64': 234, 'aarch64': 131}[os.uname().machine], victim, victim, 9)",
    "a descriptor of the process": "signal.pidfd_send_signal(os.pidfd_open(victim), 9)",
    "the owner of a pipe": "own_pipe(victim)",
    "its limits": "resource.prlimit(victim, resource.RLIMIT_CPU, (0, 0))",
}
OWN_PIPE = """
import fcntl, resource, signal, time
def own_pipe(victim):
    reader, writer = os.pipe()
    fcntl.fcntl(reader, fcntl.F_SETOWN, victim)
    fcntl.fcntl(reader, 10, signal.SIGKILL)
    fcntl.fcntl(reader, fcntl.F_SETFL, os.O_ASYNC)
    os.write(writer, b"x")
"""


@pytest.fixture
def victims():
    """A process for each way to harm it."""
    with ExitStack() as processes:
        yield {name: processes.enter_context(waiting_process()) for name in HARMING}


@contextmanager
def waiting_process():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_no_signals_to_other_processes(closed, unsafe, victims):
    import resource

    def limits(victim):
        return resource.prlimit(victim.pid, resource.RLIMIT_CPU)

    code = PREAMBLE + OWN_PIPE + functions(HARMING.values(), "victim")
    tests = [f"try: f{i}({victim.pid})\nexcept OSError: pass" for i, victim in enumerate(victims.values())]
    assert closed.count_passed(code, tests) == len(tests)
    with pytest.raises(subprocess.TimeoutExpired):
        victims["kill"].wait(timeout=0.2)
    assert [name for name, victim in victims.items() if victim.poll() is not None] == []
    assert {limits(victim) for victim in victims.values()} == {resource.getrlimit(resource.RLIMIT_CPU)}
    assert unsafe.count_passed(code, tests) == len(tests)
    assert limits(victims.pop("its limits")) == (0, 0)
    for name, victim in victims.items():
        assert victim.wait(timeout=30) == -signal.SIGKILL, name


def test_no_memory_of_other_processes_is_read(closed):
    code = f"""{PREAMBLE}
import errno
def f():
    attach = 16
    refused = [libc.ptrace(attach, os.getppid(), 0, 0) == -1 and errno.errorcode[ctypes.get_errno()]]
    data = ctypes.create_string_buffer(8)
    vector = (ctypes.c_void_p * 2)(ctypes.addressof(data), 8)
    refused.append(libc.process_vm_readv(os.getppid(), vector, 1, vector, 1, 0) == -1)
    refused.append(errno.errorcode[ctypes.get_errno()])
    return refused
def memory(process): open(f"/proc/{{process}}/mem", "rb")
"""
    assert closed.count_passed(code, ["assert f() == ['EPERM', True, 'EPERM']"]) == 1
    for process in ("'self'", "__import__('os').getppid()"):
        test = f"try: memory({process})\nexcept PermissionError: pass\nelse: 1 / 0"
        assert closed.count_passed(code, [test]) == 1


@pytest.mark.heavy
def test_no_other_programs(closed, unsafe):
    code = f"""{PREAMBLE}
import multiprocessing
def fork(): return os.fork() or os._exit(0)
def spawn(): return os.posix_spawn(sys.executable, [sys.executable, "-c", ""], {{}})
def execute(): os.execv("/bin/true", ["true"])
def by_libc(): return libc.fork() or os._exit(0)
def process(): multiprocessing.Process(target=print).start()
def run(): subprocess.run(["true"])
"""
    for name in ("fork", "spawn", "execute", "process", "run"):
        assert closed.count_passed(code, [f"try: {name}()\nexcept PermissionError: pass\nelse: 1 / 0"]) == 1, name
    assert closed.count_passed(code, ["assert by_libc() == -1"]) == 1
    assert unsafe.count_passed(code, ["assert fork() > 0", "run()"]) == 2


GREEDY = {
    "time": "while True: pass",
    "sleep": "import time; time.sleep(600)",
    "memory": "x = 'a' * 10**9",
    "a file": "open('x', 'wb').write(b'a' * 2**25)",
    "files": "for i in range(10**6): open(str(i), 'wb').write(b'a' * 2**23)",
    "small files": "for i in range(10**7): open(str(i), 'w').close()",
    "deep folders": "import os\nwhile True: os.mkdir('d'); os.chdir('d')",
    "folders without modes": """
import os
for i in range(999):
    os.mkdir('d', 0o300)
    os.chdir('d')
os.mkdir('d', 0)
raise SystemExit
""",
    "open files": "x = [open('/dev/null') for _ in range(1000)]",
    "threads": "import threading, time\nfor _ in range(10**4): threading.Thread(target=time.sleep, args=[60]).start()",
    "output": "while True: print('a' * 10**6)",
    "recursion": "def f(): f()\nf()",
    "limits": "import resource as r; r.setrlimit(r.RLIMIT_CPU, (99, 99)); r.setrlimit(r.RLIMIT_AS, (-1, -1))",
    "memory of the kernel": "import os\nx = [os.memfd_create('x') for _ in range(3)]",
}


@pytest.mark.heavy
@pytest.mark.parametrize("attack", GREEDY.values(), ids=GREEDY.keys())
def test_greedy_code_gets_nothing_and_leaves_nothing(tmp_path, monkeypatch, attack):
    closed_or_skip()
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    limited = CodeTester(seconds=1, memory_mb=300, unsafe=False)
    started = time.monotonic()
    assert limited.count_passed(attack, ["pass"]) == 0
    assert time.monotonic() - started < 60  # ended by the limits: 2 s and what removing takes
    assert list(scratch.iterdir()) == []


TEST = "assert f(2) == 4"
EQUAL = """
class A:
    __eq__ = lambda s, o: True
    __ne__ = lambda s, o: False
"""
CHEATING = {
    "equal to everything": EQUAL + "f = lambda x: A()",
    "a number equal to everything": EQUAL.replace("A:", "A(int):") + "f = lambda x: A(1)",
    "equal inside a list": EQUAL + "f = lambda x: [A()]",
    "its own assert": """
import builtins
builtins.AssertionError = type('E', (BaseException,), {})
f = lambda x: 0
""",
    "another exec": "import builtins\nbuiltins.exec = builtins.compile = lambda *a: None\nf = lambda x: 0",
    "exiting well": "import os\nf = lambda x: os._exit(0)",
    "exiting": "import sys\nf = lambda x: sys.exit(0)",
    "exiting at once": "import os; os._exit(0)",
    "at exit": "import atexit, os\natexit.register(os._exit, 0)\nraise SystemExit(0)",
    "printing": "print('1' * 99, flush=True)\nf = lambda x: print('OK 1 passed') or '1'",
    "writing everywhere": """
import os
def f(x):
    for i in range(64):
        try: os.write(i, b'1' * 99)
        except OSError: pass
""",
    "writing at once": """
import os
for i in range(64):
    try: os.write(i, b'1' * 99)
    except OSError: pass
""",
    "reading all open files": """
import os, select
data = b''
for i in range(64):
    try:
        if select.select([i], [], [], 0)[0]: data += os.read(i, 10**6)
    except (OSError, ValueError): pass
f = lambda x: 4 if b'==' + b' 4' in data else 0
""",
    "frames": """
import sys
def f(x):
    frame = sys._getframe()
    while frame:
        if ''.join(['assert', ' f(2)']) in str(frame.f_locals) + str(frame.f_globals): return 4
        frame = frame.f_back
""",
    "objects": """
import gc
def f(x):
    for o in gc.get_objects():
        if type(o) in (list, dict, tuple) and ''.join(['assert', ' f(2)']) in repr(o)[:10**6]: return 4
""",
    "tracing": "import sys\nsys.settrace(lambda *a: None)\nf = lambda x: 0",
    "other real functions": "len = abs = isinstance = all = any = print = lambda *a: 4\nf = lambda x: 0",
    "patching unittest": "import unittest\nunittest.TestCase.assertEqual = lambda *a: None\nf = lambda x: 0",
    "modules of its own": """
import sys
for name in ('json', 'unittest', 're'): open(name + '.py', 'w').write('raise SystemExit')
sys.path.insert(0, '.')
f = lambda x: 0
""",
    "an endless answer": "f = lambda x: iter(int, 1)",
    "a name that is all": "class G(dict):\n    __missing__ = lambda s, k: s\nf = G()",
    "a mock": "import unittest.mock\nf = unittest.mock.MagicMock()",
    "an error": "class E(BaseException): pass\ndef f(x): raise E",
    "an end of iteration": "def f(x): raise StopIteration(4)",
    "an interrupt": "def f(x): raise KeyboardInterrupt",
}


@pytest.mark.parametrize("attack", CHEATING.values(), ids=CHEATING.keys())
def test_no_verdict_is_faked(closed, attack):
    assert closed.count_passed(attack, [TEST, TEST]) == 0


LOOSE_TESTS = {
    "abs(f(2) - 4) < 1e-6": "class A:\n    __sub__ = __rsub__ = lambda s, o: 0.0\nf = lambda x: A()",
    "len(f(2)) == 3": "def len(x): return 3\nf = lambda x: 0",
    "isinstance(f(2), int)": "class A:\n    __class__ = int\nf = lambda x: A()",
    "math.isclose(f(2), 4)": "class math:\n    isclose = lambda *a: True\nf = lambda x: 0",
    "np.allclose(f(2), 4)": "class np:\n    allclose = lambda *a: True\nf = lambda x: 0",
    "f(2) <= 4": "class A:\n    __le__ = __lt__ = __ge__ = __gt__ = lambda s, o: True\nf = lambda x: A()",
    "f(2) in (4, 5)": "class A:\n    __eq__ = lambda s, o: True\nf = lambda x: A()",
    "4 in f(2)": "class A:\n    __contains__ = lambda s, o: True\nf = lambda x: A()",
    "f(2) and not f(3)": "class A: pass\nf = lambda x: A()",
    "all(map(lambda x: f(x) == x * x, [2, 3]))": "def f(x): raise StopIteration",
    "[*map(f, [2, 3])] != [0]": "def f(x): raise StopIteration",
    "sorted(f([3, 4])) == [3, 4]": "class A(list):\n    __eq__ = lambda s, o: True\nf = lambda x: A()",
}


@pytest.mark.parametrize("test", LOOSE_TESTS)
def test_no_verdict_is_faked_in_a_loose_test(closed, test):
    assert closed.count_passed(LOOSE_TESTS[test], [f"assert {test}"]) == 0


SPY = """
import gc, sys
from sandbox.remote import Peer
peer = next(o for o in gc.get_objects() if type(o) is Peer)
def ask(operation, *operands):
    peer._send(["request", operation, list(operands), []])
    return peer._receive()
"""
MESSAGES = {
    "eval": "ask('call', ['builtin', 'eval'], '__import__(\"os\").mkdir(\"pwned\")')",
    "a module": "ask('getattr', ['module', 'os'], 'mkdir')",
    "an attribute of a function": "ask('getattr', peer._encode(x, None), '__globals__')",
    "the frame of a function": "ask('getattr', peer._encode(x, None), 'f_globals')",
    "setting": "ask('setattr', peer._encode(x, None), 'y', 4)",
    "no operation": "ask(['x'], 3)",
    "no object": "ask('call', ['yours', 10**6])",
    "no message": "peer._send(4)",
    "a fake reply": "peer._send(['returned', True, [[0, [4]], [7, []]], ''])",
    "a large message": "__import__('os').write(4, bytes([255] * 8))",
    "a fake text": "peer._send(['returned', 0, [], '1' * 9])",
}


@pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES.keys())
def test_no_message_reaches_into_the_tests(closed, message):
    """An answer may speak the protocol itself."""
    code = f"{SPY}\ndef f(x):\n    result = {message}\n    return 4 if result and 'returned' in result else 0"
    tests = [
        "expected = 4\ndef g(): return expected",
        "assert f(g) == expected",
        "assert 'pwned' in __import__('os').listdir()",
    ]
    assert closed.count_passed(code, tests) <= 1


def test_a_function_of_the_tests_shows_nothing_but_its_results(closed):
    code = """
def f(g):
    for path in ("__globals__", "__code__", "__closure__", "__self__", "__class__", "gi_frame", "__builtins__"):
        try: value = getattr(g, path)
        except (AttributeError, PermissionError): continue
        if "expected" in str(value): return "seen"
    return g(3)
"""
    assert closed.count_passed(code, ["expected = 9\ndef g(x): return x * x\nassert f(g) == expected"]) == 1
    assert closed.count_passed(code, ["expected = 9\ndef g(x): return x * x\nassert f(g) == 'seen'"]) == 0


def test_an_answer_that_ends_is_no_expected_error(closed):
    test = "try: f(2)\nexcept BaseException: pass\nelse: 1 / 0"
    assert closed.count_passed("def f(x): raise ValueError", [test, "pass"]) == 2
    assert closed.count_passed("import os\ndef f(x): os._exit(0)", [test, "pass"]) == 0


@pytest.mark.heavy
def test_many_answers_at_once(closed):
    codes = [f"def f(x): return x + {i}" for i in range(16)]
    with ThreadPoolExecutor(8) as threads:
        passed = list(threads.map(lambda code: closed.count_passed(code, ["assert f(0) % 2 == 0"]), codes))
    assert passed == [1, 0] * 8


RUNNER = """
import ctypes, os, signal, sys, threading
adopts_orphans = 36
ctypes.CDLL(None).prctl(adopts_orphans, 1, 0, 0, 0)
from textenv.sandbox.running import CodeTester
ENDLESS = "import time, threading; threading.Thread(target=time.sleep, args=[600]).start(); time.sleep(600)"
def left():
    children = open(f"/proc/self/task/{os.getpid()}/children").read()
    return children, threading.active_count(), os.listdir(os.environ["TMPDIR"])
"""


def start(program, folder):
    """A process with an empty folder for temporary files, which adopts what its children leave."""
    env = os.environ | {"TMPDIR": str(folder)}
    return subprocess.Popen([sys.executable, "-c", RUNNER + program], env=env, stdout=subprocess.PIPE, text=True)


def processes_in(folder):
    """Processes whose working directory is in this folder, or was before it was removed."""
    links = []
    for process in os.listdir("/proc"):
        try:
            links.append(os.readlink(f"/proc/{process}/cwd"))
        except OSError:
            continue
    return [link for link in links if link.startswith(str(folder))]


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.heavy
def test_no_zombies_threads_or_folders_are_left(tmp_path):
    closed_or_skip()
    program = """
tester = CodeTester(seconds=1, memory_mb=300, unsafe=False)
for code in ("", ENDLESS, "import os; os._exit(0)", "1 / 0"):
    tester.count_passed(code, ["pass", "while True: pass"])
print(left())
"""
    with start(program, tmp_path) as process:
        assert process.communicate(timeout=120)[0] == "('', 1, [])\n"


@pytest.mark.heavy
def test_nothing_is_left_after_an_interrupt(tmp_path):
    closed_or_skip()
    program = """
tester = CodeTester(seconds=100, memory_mb=300, unsafe=False)
print("ready", flush=True)
try: tester.count_passed(ENDLESS, ["pass"])
except KeyboardInterrupt: print(left())
"""
    with start(program, tmp_path) as process:
        assert process.stdout.readline() == "ready\n"
        wait_until(lambda: len(processes_in(tmp_path)) == 3)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60)[0] == "('', 1, [])\n"
    assert processes_in(tmp_path) == []


@pytest.mark.heavy
def test_nothing_is_left_after_a_kill(tmp_path):
    closed_or_skip()
    program = """
tester = CodeTester(seconds=100, memory_mb=300, unsafe=False)
print("ready", flush=True)
tester.count_passed(ENDLESS, ["pass"])
"""
    with start(program, tmp_path) as process:
        assert process.stdout.readline() == "ready\n"
        wait_until(lambda: len(processes_in(tmp_path)) == 3)
        process.kill()
        process.wait()
        wait_until(lambda: processes_in(tmp_path) == [] and list(tmp_path.iterdir()) == [])

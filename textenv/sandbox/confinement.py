"""Confinement of a process by Linux itself: Landlock for files, a filter of system calls for all else, and limits.

Imported by the process that is confined, so it needs the standard library alone.

Sources: https://docs.kernel.org/userspace-api/landlock.html and https://docs.kernel.org/userspace-api/seccomp_filter.html
"""

import ctypes
import errno
import os
import struct
from collections.abc import Sequence

# Landlock: numbers of its calls, the same on all machines, and kinds of access by the version that brought them
_CREATE_RULESET = 444
_ADD_RULE = 445
_RESTRICT_SELF = 446
_EXECUTE = 1 << 0
_WRITE_FILE = 1 << 1
_READ_FILE = 1 << 2
_READ_DIR = 1 << 3
_TRUNCATE = 1 << 14
_ACCESS_BITS_BY_VERSION = (0, 13, 14, 15, 15, 16)
"""Number of kinds of access to files that each version of Landlock knows; later versions know as many as the last."""
_NOT_IN_THE_FOLDER = _EXECUTE | 1 << 6 | 1 << 9 | 1 << 10 | 1 << 11 | 1 << 15
"""Executing, making devices, sockets and pipes, and controlling devices."""

# Filters of system calls: classic BPF (linux/filter.h) over struct seccomp_data
_LOAD = 0x20
_IF_EQUAL = 0x15
_IF_AT_LEAST = 0x35
_IF_ANY_BIT = 0x45
_AND = 0x54
_RETURN = 0x06
_NUMBER_AT = 0
_ARCHITECTURE_AT = 4
_ARGUMENT_AT = 16
"""Offset of the lower half of a call's first argument; the others follow, 8 bytes apart."""
_ALLOW = 0x7FFF0000
_KILL = 0x80000000
_REFUSE = 0x00050000 | errno.EPERM
_UNKNOWN_CALL = 0x00050000 | errno.ENOSYS

_PR_SET_PDEATHSIG = 1
_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_FIRST_UNKNOWN_CALL = 450
"""Later calls are refused as unknown, as an older kernel does; so are x86's calls of the x32 ABI, far above."""

_REFUSED_CALLS = {
    # Other programs, and signals to them; `clone` may make threads, `tgkill` may reach the process itself
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281),
    "kill": (62, 129), "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438),
    # Memory, limits and turns of other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "process_madvise": (440, 440), "process_mrelease": (448, 448), "migrate_pages": (256, 238),
    "move_pages": (279, 239), "setpriority": (141, 140), "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "sched_setattr": (314, 274),
    "ioprio_set": (251, 30), "perf_event_open": (298, 241),
    # Network and Unix sockets; `socketpair` may make streams, which asyncio needs
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201), "accept": (43, 202),
    "accept4": (288, 242),
    # What Landlock leaves open about files: modes, owners, times, attributes, lengths (before its version 3), events
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "chown": (92, None), "lchown": (94, None),
    "fchown": (93, 55), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None), "futimesat": (261, None),
    "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16), "truncate": (76, 45),
    "getxattr": (191, 8), "lgetxattr": (192, 9), "fgetxattr": (193, 10), "listxattr": (194, 11),
    "llistxattr": (195, 12), "flistxattr": (196, 13), "inotify_init": (253, None),
    "inotify_init1": (294, 26), "fanotify_init": (300, 262),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    # Other views of the file system
    "chroot": (161, 51), "pivot_root": (155, 41), "mount": (165, 40), "umount2": (166, 39), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "unshare": (272, 97), "setns": (308, 268),
    # Memory and messages that outlive the process or escape its limits
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196),
    "shmctl": (31, 195), "semget": (64, 190), "semop": (65, 193), "semctl": (66, 191), "semtimedop": (220, 192),
    "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187), "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    # The kernel's own: keys, programs, calls that pass by this filter, modules, clocks, names
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "bpf": (321, 280),
    "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142),
    "syslog": (103, 116), "acct": (163, 89), "settimeofday": (164, 170), "clock_settime": (227, 112),
    "adjtimex": (159, 171), "clock_adjtime": (305, 266), "sethostname": (170, 161), "setdomainname": (171, 162),
    "swapon": (167, 224), "swapoff": (168, 225), "iopl": (172, None), "ioperm": (173, None),
    "modify_ldt": (154, None), "vhangup": (153, 58), "sync": (162, 81), "syncfs": (306, 267),
}  # fmt: skip
"""Numbers of refused system calls on x86-64 and on arm64; None: there is no such call."""
_REPLACED_CALLS = {"clone3": (435, 435), "openat2": (437, 437)}
"""Calls whose arguments a filter cannot read; callers fall back to `clone` and `openat`."""


class NotConfinedError(RuntimeError):
    """This system cannot start a process that is closed off; the text says what it lacks."""


def check_system() -> None:
    """Raise a `NotConfinedError` if this system lacks Landlock, or has another processor."""
    system = os.uname()
    if system.sysname != "Linux":
        raise NotConfinedError(f"this is {system.sysname}, and only Linux has Landlock")
    if system.machine not in _ARCHITECTURES:
        raise NotConfinedError(f"the processor is {system.machine}, expected {' or '.join(_ARCHITECTURES)}")
    if landlock_version() == 0:
        raise NotConfinedError(
            f"the kernel {system.release} has no Landlock, or it is off: expected Linux 5.13 or newer, with "
            "'landlock' in /sys/kernel/security/lsm, and a container whose seccomp profile allows it"
        )


def landlock_version() -> int:
    """Return the version of the kernel's Landlock; 0 if there is none."""
    ask_version = 1
    return max(_libc().syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ask_version), 0)


def confine(folder: str, readable: Sequence[str]) -> None:
    """Close this process and its threads off, for ever: only ``folder`` is writable, only ``readable`` is legible.

    No network, no new processes, no signals to others, no capabilities. Open files stay open, so the caller closes
    what the process must not have.

    Raises:
        NotConfinedError: if a step fails; the process must then not go on.
    """
    check_system()
    _drop_capabilities()
    _check("no_new_privs", _libc().prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _restrict_files(folder, readable)
    _restrict_calls()


def limit(seconds: int, memory_bytes: int, file_bytes: int, open_files: int) -> None:
    """Limit this process's CPU time, address space, size of a file and number of open files; no core dumps.

    Limits that are lower already stay.
    """
    import resource

    limits = {"CPU": seconds, "AS": memory_bytes, "FSIZE": file_bytes, "NOFILE": open_files, "CORE": 0}
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        _, highest = resource.getrlimit(kind)
        if highest == resource.RLIM_INFINITY or value < highest:
            resource.setrlimit(kind, (value, value))


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent ends (Linux; nothing happens elsewhere)."""
    if os.uname().sysname == "Linux":
        sigkill = 9
        _check("pdeathsig", _libc().prctl(_PR_SET_PDEATHSIG, sigkill, 0, 0, 0))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(step: str, result: int) -> int:
    if result < 0:
        raise NotConfinedError(f"{step}: {os.strerror(ctypes.get_errno())}")
    return result


def _drop_capabilities() -> None:
    """Root keeps its files, but no privileges, so it cannot raise its limits either."""
    version_3 = 0x20080522
    header = ctypes.create_string_buffer(struct.pack("=Ii", version_3, 0))
    no_capabilities = ctypes.create_string_buffer(24)
    _check("capset", _libc().capset(header, no_capabilities))


def _restrict_files(folder: str, readable: Sequence[str]) -> None:
    libc = _libc()
    version = landlock_version()

    # What is refused unless a rule allows it: all access to files, TCP, signals and abstract sockets
    num_bits = _ACCESS_BITS_BY_VERSION[min(version, len(_ACCESS_BITS_BY_VERSION) - 1)]
    all_access = (1 << num_bits) - 1
    attributes = [all_access]
    if version >= 4:
        attributes.append(0b11)
    if version >= 6:
        attributes.append(0b11)
    handled = ctypes.create_string_buffer(struct.pack(f"={len(attributes)}Q", *attributes), 8 * len(attributes))
    ruleset = _check("Landlock", libc.syscall(_CREATE_RULESET, handled, ctypes.c_size_t(len(handled)), 0))

    # What is allowed
    _allow(ruleset, folder, all_access & ~_NOT_IN_THE_FOLDER)
    for path in readable:
        if os.path.isdir(path):
            _allow(ruleset, path, _READ_FILE | _READ_DIR)
        elif os.path.exists(path):
            _allow(ruleset, path, _READ_FILE)
    _allow(ruleset, os.devnull, (_READ_FILE | _WRITE_FILE | _TRUNCATE) & all_access)

    _check("Landlock", libc.syscall(_RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)


def _allow(ruleset: int, path: str, access: int) -> None:
    beneath_path = 1
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    rule = ctypes.create_string_buffer(struct.pack("=Qi", access, descriptor))
    _check(f"Landlock, {path}", _libc().syscall(_ADD_RULE, ruleset, beneath_path, rule, 0))
    os.close(descriptor)


def _restrict_calls() -> None:
    instructions = _call_filter(os.uname().machine, os.getpid())
    code = ctypes.create_string_buffer(b"".join(instructions))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(instructions), ctypes.addressof(code)))
    filter_mode = 2
    _check("seccomp", _libc().prctl(_PR_SET_SECCOMP, filter_mode, program, 0, 0))


def _call_filter(machine: str, process: int) -> list[bytes]:
    """Return the instructions of a filter for this process; its threads have it too."""
    column = list(_ARCHITECTURES).index(machine)
    instructions = [
        _instruction(_LOAD, _ARCHITECTURE_AT),
        _instruction(_IF_EQUAL, _ARCHITECTURES[machine], 1, 0),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _NUMBER_AT),
        _instruction(_IF_AT_LEAST, _FIRST_UNKNOWN_CALL, 0, 1),
        _instruction(_RETURN, _UNKNOWN_CALL),
    ]
    for calls, verdict in ((_REFUSED_CALLS, _REFUSE), (_REPLACED_CALLS, _UNKNOWN_CALL)):
        for numbers in calls.values():
            number = numbers[column]
            if number is not None:
                instructions.append(_instruction(_IF_EQUAL, number, 0, 1))
                instructions.append(_instruction(_RETURN, verdict))

    # Calls that are refused for some arguments. Each list tests one argument, and ends in both verdicts
    thread_flag = 0x10000
    instructions += _by_argument((56, 220)[column], 0, _refuse_unless(_IF_ANY_BIT, thread_flag))  # clone
    instructions += _by_argument((234, 131)[column], 0, _refuse_unless(_IF_EQUAL, process))  # tgkill
    instructions += _by_argument((302, 261)[column], 0, _refuse_unless(_IF_EQUAL, 0))  # prlimit64 of others
    instructions += _by_argument((157, 167)[column], 0, _refuse_if(_PR_SET_PDEATHSIG))  # prctl
    stream = 1
    type_mask = 0xF
    is_stream = [_instruction(_AND, type_mask), *_refuse_unless(_IF_EQUAL, stream)]
    instructions += _by_argument((53, 199)[column], 1, is_stream)  # socketpair
    set_owner = 8
    set_signal = 10
    set_owner_ex = 15
    set_lease = 1024
    notify = 1026
    owner_commands = _refuse_if(set_owner, set_signal, set_owner_ex, set_lease, notify)
    instructions += _by_argument((72, 25)[column], 1, owner_commands)  # fcntl
    set_owner_by_ioctl = 0x8901
    set_group_by_ioctl = 0x8902
    type_into_terminal = 0x5412
    terminal_commands = _refuse_if(set_owner_by_ioctl, set_group_by_ioctl, type_into_terminal)
    instructions += _by_argument((16, 29)[column], 1, terminal_commands)  # ioctl

    # Opening for reading with truncation, which the first versions of Landlock take for reading
    access_and_truncate = os.O_TRUNC | os.O_ACCMODE
    truncates = [_instruction(_AND, access_and_truncate), *_refuse_if(os.O_TRUNC | os.O_RDONLY)]
    instructions += _by_argument((257, 56)[column], 2, truncates)  # openat
    if machine == "x86_64":
        instructions += _by_argument(2, 1, truncates)  # open
    instructions.append(_instruction(_RETURN, _ALLOW))
    return instructions


def _instruction(code: int, value: int, jump_if_true: int = 0, jump_if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, jump_if_true, jump_if_false, value)


def _by_argument(number: int, argument: int, instructions: list[bytes]) -> list[bytes]:
    """Return instructions that leave the verdict on this call to others, which find the argument loaded."""
    load = _instruction(_LOAD, _ARGUMENT_AT + 8 * argument)
    return [_instruction(_IF_EQUAL, number, 0, 1 + len(instructions)), load, *instructions]


def _refuse_unless(test: int, value: int) -> list[bytes]:
    return [_instruction(test, value, 1, 0), _instruction(_RETURN, _REFUSE), _instruction(_RETURN, _ALLOW)]


def _refuse_if(*values: int) -> list[bytes]:
    instructions = []
    for value in values:
        instructions.append(_instruction(_IF_EQUAL, value, 0, 1))
        instructions.append(_instruction(_RETURN, _REFUSE))
    return [*instructions, _instruction(_RETURN, _ALLOW)]

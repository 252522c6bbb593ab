"""The inside of the sandbox: run by a bare interpreter, never imported. Standard library only.

    evaluator ──> guard ──> first process of fresh namespaces ──> the program: limits, Landlock, seccomp, then exec()

The processes between turn the program's end into their own exit status; the evaluator keeps the clock.
"""

import contextlib
import ctypes
import json
import os
import resource
import signal
import struct
import sys
import types
from collections.abc import Iterator
from typing import Any, NoReturn

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x08000000, 0x10000000, 0x20000000, 0x40000000
EPERM, ENOSYS = 1, 38

SYSTEM_FOLDERS = ("/usr", "/lib", "/lib64", "/etc", "/nix", "/gnu", "/opt")
"""Readable, besides the interpreter's own: shared libraries, locales, time zones."""

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CLONE = (56, 220)
REFUSED: dict[str, tuple[int, int]] = {  # numbers on x86-64 and AArch64
    "socket": (41, 198),
    "execve": (59, 221),
    "execveat": (322, 281),
    "kill": (62, 129),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "setpgid": (109, 154),
    "setsid": (112, 157),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "mount_setattr": (442, 442),
    "io_uring_setup": (425, 425),  # its rings would make calls that no filter sees
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "keyctl": (250, 219),
}
ONLY_X86_64 = {"fork": 57, "vfork": 58}
CLONE3, CLONE_THREAD = 435, 0x10000


def main() -> None:
    """Read the order from stdin, run it, and end as the program ended."""
    order: dict[str, Any] = json.load(sys.stdin)
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    in_effect = []
    if "namespace" in order["guards"] and hasattr(LIBC, "unshare"):
        flags = CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWPID | CLONE_NEWIPC
        if LIBC.unshare(flags) == 0:
            in_effect.append("namespace")
    child = os.fork()
    if child:
        _end_as(child, order)
    if in_effect:  # the first process of a namespace ignores most signals: the program is its second
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        program = os.fork()
        if program:
            _end_as(program, order)
    _inside(order, in_effect)


def _end_as(child: int, order: dict[str, Any]) -> NoReturn:
    """Wait for the child and end with its status, 128 + N for signal N; a kill for too much CPU is a SIGXCPU."""
    os.close(order["verdict_fd"])
    _, status, usage = os.wait4(child, 0)
    if not os.WIFSIGNALED(status):
        os._exit(os.WEXITSTATUS(status))
    number = os.WTERMSIG(status)
    used_up = number == signal.SIGKILL and usage.ru_utime + usage.ru_stime >= order["cpu_seconds"]
    os._exit(128 + (signal.SIGXCPU if used_up else number))


def _inside(order: dict[str, Any], in_effect: list[str]) -> NoReturn:
    """Shut every door, run the program, and say how it ended."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    fd: int = order["verdict_fd"]
    sentinel: str = order.pop("sentinel")
    program: str = order.pop("program")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.chdir(order["folder"])
    _limit(order)
    wanted = order["guards"]
    LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if "landlock" in wanted and _landlock(order["folder"]):
        in_effect.append("landlock")
    if "seccomp" in wanted and _seccomp():
        in_effect.append("seccomp")
    else:
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))  # no processes and no threads; binds everybody but root
    if "audit" in wanted and not {"landlock", "seccomp"} <= set(in_effect):
        _audit(order["folder"])
        in_effect.append("audit")
    _say(fd, guards=in_effect)
    out_of_memory = b'{"end": "out of memory"}\n'
    try:
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        exec(compile(program, "program.py", "exec"), module.__dict__)
    except MemoryError:
        os.write(fd, out_of_memory)
    except SystemExit as exit_:
        _say(fd, end="failed", detail=f"left before the tests were through: exit({exit_.code!r})"[:500])
    except BaseException as error:
        with contextlib.suppress(BaseException):  # an error whose own text raises is still a failure
            _say(fd, end="failed", detail=f"{type(error).__name__}: {error}".rstrip(": ")[:500])
    else:
        _say(fd, end="passed", sentinel=sentinel)
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
    os._exit(0)


def _say(fd: int, **words: Any) -> None:
    os.write(fd, json.dumps(words).encode() + b"\n")


def _limit(order: dict[str, Any]) -> None:
    for which, most in (
        (resource.RLIMIT_CPU, order["cpu_seconds"]),
        (resource.RLIMIT_AS, order["memory"]),
        (resource.RLIMIT_FSIZE, order["file_bytes"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = most + 1 if which == resource.RLIMIT_CPU else most  # soft: SIGXCPU; hard: SIGKILL
        with contextlib.suppress(ValueError, OSError):  # lower than asked already, or not to be had on this system
            resource.setrlimit(which, (most, hard))


# ------------------------------------------------------------------------------------------------------------- files


def _landlock(folder: str) -> bool:
    """Write in the folder only; read there, the interpreter and the system's libraries. False where there is none."""
    version = LIBC.syscall(444, None, 0, 1)
    if version < 1:
        return False
    reads = 1 << 0 | 1 << 2 | 1 << 3  # execute (shared libraries), read a file, read a folder
    all_rights = (1 << 13) - 1
    for since, bit in ((2, 13), (3, 14), (5, 15)):
        all_rights |= 1 << bit if version >= since else 0
    fields = [all_rights]
    if version >= 4:
        fields.append(0b11)  # TCP: neither bind nor connect
    if version >= 6:
        fields.append(0b11)  # neither abstract sockets nor signals across the border
    attributes = struct.pack(f"={len(fields)}Q", *fields)
    ruleset = LIBC.syscall(444, attributes, len(attributes), 0)
    if ruleset < 0:
        return False
    for path, rights in _opened(folder, all_rights, reads):
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue  # not on this system
        LIBC.syscall(445, ruleset, 1, struct.pack("=Qi", rights, place), 0)
        os.close(place)
    done: bool = LIBC.syscall(446, ruleset, 0) == 0
    os.close(ruleset)
    return done


def _opened(folder: str, all_rights: int, reads: int) -> Iterator[tuple[str, int]]:
    files_only = 1 << 1 | 1 << 2 | (all_rights & 1 << 14)
    yield folder, all_rights
    for path in (*SYSTEM_FOLDERS, sys.base_prefix, sys.base_exec_prefix):
        yield path, reads
    for path in ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random"):
        yield path, files_only


# ------------------------------------------------------------------------------------------------------ system calls


def _seccomp() -> bool:
    """A filter: no sockets, no processes (threads are let through), no exec. False on an unknown machine."""
    machine = os.uname().machine
    if machine not in ARCHITECTURES or sys.maxsize < 2**32:
        return False
    column = list(ARCHITECTURES).index(machine)
    refused = [numbers[column] for numbers in REFUSED.values()]
    refused += ONLY_X86_64.values() if machine == "x86_64" else ()
    load, jump_equal, jump_set, give = 0x20, 0x15, 0x45, 0x06
    allow, refuse, kill = 0x7FFF0000, 0x00050000 | EPERM, 0x80000000
    code = [
        (load, 0, 0, 4),  # which machine the call is for
        (jump_equal, 1, 0, ARCHITECTURES[machine]),
        (give, 0, 0, kill),
        (load, 0, 0, 0),  # its number
        (0x35, 0, 1, 0x40000000),  # x32 calls have numbers of their own
        (give, 0, 0, refuse),
        (jump_equal, 0, 1, CLONE3),
        (give, 0, 0, 0x00050000 | ENOSYS),  # its flags cannot be seen: libc then uses clone
        (jump_equal, 0, 4, CLONE[column]),
        (load, 0, 0, 16),  # the flags
        (jump_set, 0, 1, CLONE_THREAD),
        (give, 0, 0, allow),
        (give, 0, 0, refuse),
    ]
    for number in refused:
        code += [(jump_equal, 0, 1, number), (give, 0, 0, refuse)]
    code.append((give, 0, 0, allow))
    filter_ = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in code))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(code), ctypes.addressof(filter_)))
    done: bool = LIBC.prctl(PR_SET_SECCOMP, 2, header, 0, 0) == 0
    return done


# --------------------------------------------------------------------------------------- the interpreter's own refusal


def _audit(folder: str) -> None:
    """Where the kernel helps less: the interpreter refuses sockets, processes, ctypes and writing elsewhere."""
    inside = os.path.realpath(folder) + os.sep
    refused = {"socket.__new__", "subprocess.Popen", "os.system", "os.fork", "os.forkpty", "os.exec"}
    refused |= {"os.posix_spawn", "os.kill", "os.killpg", "signal.pthread_kill", "ctypes.dlopen"}
    changes = {"os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.chmod", "os.truncate"}

    def elsewhere(path: object) -> bool:
        return not isinstance(path, int) and not os.path.realpath(os.fsdecode(path)).startswith(inside)  # type: ignore[arg-type]

    def hook(event: str, values: tuple[Any, ...]) -> None:
        if event in refused:
            raise PermissionError(f"{event} is refused here")
        writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
        if event == "open" and values[2] & writes and values[0] != os.devnull and elsewhere(values[0]):
            raise PermissionError(f"writing to {values[0]} is refused here")
        if event in changes and any(elsewhere(value) for value in values if isinstance(value, str | bytes)):
            raise PermissionError(f"{event} outside the folder is refused here")

    sys.addaudithook(hook)


if __name__ == "__main__":
    main()

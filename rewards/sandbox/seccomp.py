"""System-call filter of the sandbox, for the kernel's seccomp (classic BPF).

It is a second layer: the other isolation does not depend on it. It blocks system calls that ordinary programs never use
and that earlier escapes used. It also closes two gaps. Sockets of some families ignore network namespaces: vsock
reaches the host of a virtual machine. And a process could read another process of the same sandbox.
"""

from __future__ import annotations

import errno
import platform
import struct
from dataclasses import dataclass

from rewards.sandbox.base import SandboxUnavailable

# CLONE_NEW of time, mount, cgroup, uts, ipc, user, pid and net.
NEW_NAMESPACES = 0x7E020080
"""Flags of clone() that create a namespace. Inside some of them a process is root again."""
# AF_UNIX, AF_INET and AF_INET6.
FAMILIES = (1, 2, 10)
"""Allowed socket families: unix, and the internet's two, which have no network."""
# Opcodes of <linux/bpf_common.h>: load an absolute word, jump if ==, >= or &, and return.
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
# SECCOMP_RET of ALLOW, KILL_PROCESS and ERRNO. The low bits of the last are the error number.
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
# Offsets in struct seccomp_data. On little-endian machines 16 is the low half of the first argument.
AT_NUMBER, AT_MACHINE, AT_FIRST_ARGUMENT = 0, 4, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """System-call numbers of one processor architecture."""

    audit: int
    """The kernel's number of the architecture (AUDIT_ARCH)."""
    clone: int
    socket: int
    prlimit: int
    refused: tuple[int, ...]
    other_set: int | None = None
    """First number of a second set of calls (x32), all refused."""


CLONE3 = 435
EVERYWHERE = (
    *(425, 426, 427),  # io_uring
    *(428, 429, 430, 431, 432, 433, 442),  # open_tree, move_mount, fsopen and what follows
    438,  # pidfd_getfd
)
MACHINES = {
    "x86_64": Machine(
        audit=0xC000003E,
        clone=56,
        socket=41,
        prlimit=302,
        other_set=0x40000000,
        refused=(
            *EVERYWHERE,
            *(101, 310, 311, 312),  # ptrace, process_vm_readv, process_vm_writev, kcmp
            *(165, 166, 155, 161, 308, 272),  # mount, umount2, pivot_root, chroot, setns, unshare
            *(248, 249, 250),  # add_key, request_key, keyctl
            *(321, 298, 323, 300),  # bpf, perf_event_open, userfaultfd, fanotify_init
            *(175, 313, 176, 246, 320),  # init_module, finit_module, delete_module, kexec_load, kexec_file_load
            *(169, 167, 168, 163, 179, 103),  # reboot, swapon, swapoff, acct, quotactl, syslog
            *(172, 173, 154, 135, 134, 153),  # iopl, ioperm, modify_ldt, personality, uselib, vhangup
            *(303, 304, 212),  # name_to_handle_at, open_by_handle_at, lookup_dcookie
        ),
    ),
    "aarch64": Machine(
        audit=0xC00000B7,
        clone=220,
        socket=198,
        prlimit=261,
        refused=(
            *EVERYWHERE,
            # as for x86_64, line by line; calls that aarch64 lacks are left out
            *(117, 270, 271, 272),
            *(40, 39, 41, 51, 268, 97),
            *(217, 218, 219),
            *(280, 241, 282, 262),
            *(105, 273, 106, 104, 294),
            *(142, 224, 225, 89, 60, 116),
            *(92, 58),
            *(264, 265, 18),
        ),
    ),
}


def make_filter(machine: str | None = None) -> bytes:
    """Return the BPF program. Raises SandboxUnavailable for an unknown architecture."""
    kind = machine or platform.machine()
    if kind not in MACHINES:
        raise SandboxUnavailable(
            f"the sandbox knows the system calls of {' and '.join(MACHINES)} only, and this machine is {kind}: "
            "use a sandbox on another machine (an http:// address)"
        )
    calls = MACHINES[kind]
    # numbers mean other calls on another architecture, so a call of another one kills the process
    program = [
        _step(LOAD, AT_MACHINE),
        _step(EQUAL, calls.audit, yes=1),
        _step(RETURN, KILL),
        _step(LOAD, AT_NUMBER),
    ]
    # x32 calls do the same as others, under numbers that the list below lacks
    if calls.other_set is not None:
        program += [_step(AT_LEAST, calls.other_set, no=1), _refuse(errno.ENOSYS)]
    for number in calls.refused:
        program += [_step(EQUAL, number, no=1), _refuse(errno.EPERM)]
    # the C library falls back to clone, whose flags a filter can read
    program += [_step(EQUAL, CLONE3, no=1), _refuse(errno.ENOSYS)]
    program += [
        _step(EQUAL, calls.clone, no=4),
        _step(LOAD, AT_FIRST_ARGUMENT),
        _step(ANY_BIT, NEW_NAMESPACES, no=1),
        _refuse(errno.EPERM),
        _step(RETURN, ALLOW),
    ]
    # a process may change its own limits (pid 0), and no other's
    program += [
        _step(EQUAL, calls.prlimit, no=4),
        _step(LOAD, AT_FIRST_ARGUMENT),
        _step(EQUAL, 0, yes=1),
        _refuse(errno.EPERM),
        _step(RETURN, ALLOW),
    ]
    # the last block: every call but socket() is allowed
    program += [_step(EQUAL, calls.socket, yes=1), _step(RETURN, ALLOW), _step(LOAD, AT_FIRST_ARGUMENT)]
    for family in FAMILIES:
        program += [_step(EQUAL, family, no=1), _step(RETURN, ALLOW)]
    return b"".join([*program, _refuse(errno.EAFNOSUPPORT)])


def _step(code: int, value: int, *, yes: int = 0, no: int = 0) -> bytes:
    """Return one instruction. yes, no: number of instructions to skip."""
    # the layout of struct sock_filter
    return struct.pack("=HBBI", code, yes, no, value)


def _refuse(reason: int) -> bytes:
    return _step(RETURN, REFUSE | reason)

"""The system call filter, interpreted: it refuses the same calls on every machine."""

from __future__ import annotations

import errno
import os
import signal
import socket

import pytest

from rpcmp.process.sandbox import syscall_filter

SCHEDULING = ("affinity", "scheduler", "param", "attr")


def verdict(machine: syscall_filter.Machine, call: str | int, *given: int, audit: int = 0) -> int:
    """Return the errno with which the filter refuses a call, or 0 if it allows the call.

    This interprets the filter's BPF program.
    """
    number = machine.numbers[call] if isinstance(call, str) else call
    memory = {0: number, 4: audit or machine.audit}
    memory |= {16 + 8 * index: argument for index, argument in enumerate(given)}
    program, at, value = syscall_filter.bpf_program(machine), 0, 0
    while True:
        operation, if_true, if_false, operand = program[at]
        at += 1
        match operation:
            case 0x20:
                value = memory[operand]
            case 0x54:
                value &= operand
            case 0x06:
                return operand & 0xFFFF if operand < 0x7FFF0000 else 0
            case 0x15:
                at += if_true if value == operand else if_false
            case 0x35:
                at += if_true if value >= operand else if_false
            case 0x45:
                at += if_true if value & operand else if_false


@pytest.mark.parametrize("machine", syscall_filter.MACHINES.values(), ids=syscall_filter.MACHINES)
def test_the_filter_refuses_the_same_calls_on_every_machine(
    machine: syscall_filter.Machine,
) -> None:
    for name in set(syscall_filter.REFUSED) & set(machine.numbers):
        assert verdict(machine, name, 0) == errno.EPERM
    for name in syscall_filter.REPORTED_MISSING:
        assert verdict(machine, name, 0) == errno.ENOSYS
    stream, packets, datagrams = socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM
    for family in (socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK):
        assert verdict(machine, "socket", family, stream) == 0
    for kind in (stream, datagrams, socket.SOCK_RAW, stream | socket.SOCK_CLOEXEC):
        assert verdict(machine, "socket", socket.AF_UNIX, kind) == errno.EPERM
    assert verdict(machine, "socket", 38, packets) == errno.EPERM  # AF_ALG
    for kind in (stream, packets | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK):
        assert verdict(machine, "socketpair", socket.AF_UNIX, kind) == 0
    for kind in (datagrams, socket.SOCK_RAW):  # the kernel treats the second like the first
        assert verdict(machine, "socketpair", socket.AF_UNIX, kind) == errno.EPERM
    assert verdict(machine, "clone", 0x3D0F00) == 0  # a thread
    for namespace in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert verdict(machine, "clone", namespace | signal.SIGCHLD) == errno.EPERM
    assert verdict(machine, "ioctl", 0, 0x5401) == 0
    hostile = (0x5412, 0x541C, 0x40086602, 0x40046602, 0x401C5820)
    assert {verdict(machine, "ioctl", 0, command) for command in hostile} == {errno.EPERM}
    assert {verdict(machine, "fcntl", 0, command) for command in (1, 2, 6, 1025, 1033)} == {0}
    assert {verdict(machine, "fcntl", 0, command) for command in (1024, 1026)} == {errno.EPERM}
    for call, process in (("setpriority", os.PRIO_PROCESS), ("ioprio_set", 1)):
        for which in range(3):
            for who in (0, 4711):
                is_own = (which, who) == (process, 0)
                assert verdict(machine, call, which, who) == (0 if is_own else errno.EPERM)
    for call in ("prlimit64", *(f"sched_set{what}" for what in SCHEDULING)):
        assert verdict(machine, call, 0) == 0
        assert verdict(machine, call, 4711) == errno.EPERM
    assert verdict(machine, 63, 0) == 0
    assert verdict(machine, 0x40000000, 0) == errno.EPERM  # x32
    assert verdict(machine, 63, audit=0x40000003) == errno.EPERM  # 32 bits

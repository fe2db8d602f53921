"""Run a program without io_uring, as under the seccomp profile of a container.

Run as `python denied.py PROGRAM`: its text sees the three system calls denied.
"""

from __future__ import annotations

import ctypes
import struct
import sys

_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2
_LOAD, _AT_LEAST, _AT_MOST, _RETURN = 0x20, 0x35, 0x25, 0x06
_ALLOW, _DENY = 0x7FFF0000, 0x00050000 | 1  # with EPERM


def deny_io_uring() -> None:
    """Deny the system calls 425 to 427 to this process from now on."""
    code = b"".join(
        struct.pack("HBBI", *one)
        for one in (
            (_LOAD, 0, 0, 0),  # the number of the system call
            (_AT_LEAST, 0, 1, 425),
            (_AT_MOST, 0, 1, 427),
            (_RETURN, 0, 0, _ALLOW),
            (_RETURN, 0, 0, _DENY),
        )
    )
    held = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(held))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "no_new_privs")
    if libc.prctl(_SET_SECCOMP, _FILTER, program, 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")


if __name__ == "__main__":
    deny_io_uring()
    exec(sys.argv[1])  # noqa: S102 - what it is for

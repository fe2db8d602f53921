"""What each way of moving bytes needs of this host, and what is missing."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

from kvdock_nixl.settings import IOMethod

_IO_URING_SETUP = 425  # the same on every architecture
_PARAMETERS_BYTES = 256  # struct io_uring_params and room


def why_not(io: IOMethod) -> tuple[str, str]:
    """Return what is missing and what to do; two empty texts for nothing."""
    match io:
        case IOMethod.IO_URING:
            return _io_uring()
        case IOMethod.AIO:
            return _aio()
        case IOMethod.GDS | IOMethod.GDS_MT:
            return _gpu_direct()


def _io_uring() -> tuple[str, str]:
    """Set up a ring as NIXL does, and close it."""
    libc = ctypes.CDLL(None, use_errno=True)
    parameters = ctypes.create_string_buffer(_PARAMETERS_BYTES)
    fd = libc.syscall(
        ctypes.c_long(_IO_URING_SETUP), ctypes.c_uint(8), ctypes.byref(parameters)
    )
    if fd >= 0:
        os.close(fd)
        return "", ""
    error = ctypes.get_errno()
    other = 'or set io = "aio" and direct = true'
    if error == errno.ENOSYS:
        return "this kernel has no io_uring", f"Use Linux 5.6 or later, {other}."
    if error not in (errno.EPERM, errno.EACCES):
        return f"io_uring cannot be set up: {os.strerror(error)}", f"Retry, {other}."
    try:
        switch = Path("/proc/sys/kernel/io_uring_disabled").read_text().strip()
    except OSError:
        switch = "0"
    if switch != "0":
        return (
            f"kernel.io_uring_disabled is {switch}: io_uring is denied to this user",
            f"Set it to 0, {other}.",
        )
    what = (
        "io_uring is denied to this process, as the usual seccomp profile of a "
        "container does"
    )
    calls = "io_uring_setup, io_uring_enter and io_uring_register"
    return what, f"Allow {calls} in its profile, {other}."


def _aio() -> tuple[str, str]:
    """Compare what all processes have reserved with the system's limit."""
    folder = Path("/proc/sys/fs")
    try:
        used, most = (
            int((folder / name).read_text()) for name in ("aio-nr", "aio-max-nr")
        )
    except (OSError, ValueError):
        return "", ""
    # A reader and a writer with queues of 256, which the kernel may double or more.
    if most - used >= 2 * 256:
        return "", ""
    return (
        f"{used} of {most} asynchronous requests of this host are reserved",
        "Raise fs.aio-max-nr.",
    )


def _gpu_direct() -> tuple[str, str]:
    """Look for the pieces of GPUDirect Storage, in the order in which it needs them."""
    missing = [
        what
        for what, there in (
            ("an NVIDIA driver (libcuda.so.1)", _loads("libcuda.so.1")),
            (
                "the CUDA runtime (libcudart.so.12 or .13)",
                _loads("libcudart.so.12") or _loads("libcudart.so.13"),
            ),
            ("libcufile.so.0", _loads("libcufile.so.0")),
        )
        if not there
    ]
    if not missing:
        return "", ""
    fix = (
        "Install the driver, and nvidia-cuda-runtime and nvidia-cufile with their "
        'folders in LD_LIBRARY_PATH; without a GPU set io = "io_uring".'
    )
    return f"GPUDirect Storage lacks {', '.join(missing)}", fix


def _loads(name: str) -> bool:
    """Return whether this process can load a system library."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True

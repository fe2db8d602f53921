"""The processes of a demo: started by one that loads no torch, ended with it."""

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence


@contextlib.contextmanager
def running(
    module: str, arguments: Sequence[str], *, stderr: int, pass_fds: Sequence[int] = ()
) -> Iterator[subprocess.Popen[str]]:
    """Run a module in a process of its own, which is killed if the block raises.

    Args:
        module: What `python -m` runs; it calls `end_with_parent`.
        arguments: Its arguments.
        stderr: File descriptor for all that is not an event.
        pass_fds: File descriptors that the process inherits, by the same numbers.

    Yields:
        The process, with events as lines on its standard output.
    """
    environment = {
        **os.environ,
        # Models are made here; nothing may be looked for anywhere else.
        "HF_HUB_OFFLINE": "1",
        # Hints at faster kernels and progress bars are noise here.
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    process = subprocess.Popen(  # noqa: S603 - this interpreter, this package
        [sys.executable, "-m", module, *arguments],
        # Nothing is written to it: its end is the end of this process.
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env=environment,
        pass_fds=pass_fds,
    )
    with process:
        try:
            yield process
        except BaseException:
            # Leaving the block would otherwise wait for its whole job.
            process.kill()
            raise


def end_with_parent() -> None:
    """End this process as soon as the one that started it has ended.

    Also where that one was killed and could not end anything. It holds the other
    end of standard input, which the kernel closes then.
    """

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 1):
                pass
        os._exit(1)

    threading.Thread(target=watch, name="kvdock-demo-parent", daemon=True).start()

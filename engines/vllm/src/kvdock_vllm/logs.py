"""Show kvdock's log lines where vLLM's are shown.

vLLM gives a handler to its own logger alone. Without one, Python drops what the core
and its plugins say below a warning, and prints warnings without time and process.

Source: vLLM 0.32.0, `logger.py:DEFAULT_LOGGING_CONFIG`.
"""

from __future__ import annotations

import logging

LOGGERS = ("kvdock", "kvdock_segments")


class _ToVllm(logging.Handler):
    """Passes records to the handlers that vLLM's logger has by then.

    vLLM may configure its logger again, and a program may give the root logger a
    handler at any time: then that one prints the line already.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Pass a record on."""
        if not logging.getLogger().handlers:
            logging.getLogger("vllm").handle(record)


def show_in_vllms_log() -> None:
    """Pass kvdock's lines to vLLM's handlers; safe to call again.

    A logger that the program has given a handler or a level stays as it is.
    """
    for name in LOGGERS:
        logger = logging.getLogger(name)
        if not logger.hasHandlers() and not logger.level:
            logger.setLevel(logging.getLogger("vllm").level)
            logger.addHandler(_ToVllm())

"""Show kvdock's log lines where vLLM's are: only vLLM's own logger has a handler.

Source: vLLM 0.32.0, `logger.py:DEFAULT_LOGGING_CONFIG`.
"""

from __future__ import annotations

import logging

LOGGERS = ("kvdock", "kvdock_segments")


class _ToVllm(logging.Handler):
    """Passes records to the handlers that vLLM's logger has by then."""

    def emit(self, record: logging.LogRecord) -> None:
        """Pass a record on, unless the root logger has a handler that shows it."""
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

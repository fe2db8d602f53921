"""The command `kvdock completion`."""

from __future__ import annotations

from enum import StrEnum

from kvdock_cli.output import FINE, say


class Shell(StrEnum):
    """A shell that can complete words."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(shell: Shell, /) -> int:
    """Print the script that lets a shell complete commands and options.

    Put its output where the shell looks for such scripts, for example

    kvdock completion bash > ~/.local/share/bash-completion/completions/kvdock

    or load it in the shell's start-up file: eval "$(kvdock completion zsh)".

    Args:
        shell: The shell.
    """
    # It imports what detects the running shell, which no other command needs.
    from typer.completion import get_completion_script  # type: ignore[attr-defined] # noqa: PLC0415 - see above

    say(
        get_completion_script(
            prog_name="kvdock", complete_var="_KVDOCK_COMPLETE", shell=shell.value
        )
    )
    return FINE

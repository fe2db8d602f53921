"""The demo `send`, which the command line finds by its entry point.

Loading this module must stay cheap: what it needs is loaded once it runs.
"""

from pathlib import Path


def demo_send_of(
    *,
    model: str,
    backend: str,
    set_: list[str],
    directory: Path | None,
    as_json: bool,
    size: str,
) -> int:
    """Send the caches of models from a prefill to a decode process.

    Entry point `send` of the group `kvdock.demos`.

    Returns:
        The exit code: 0 if every claim held for every model.

    Raises:
        SettingsError: If there is no such model, size or setting.
        KvdockError: If no backend can send pages, or a process fails.
    """
    import sys  # noqa: PLC0415
    import tempfile  # noqa: PLC0415

    from kvdock import Dock  # noqa: PLC0415
    from kvdock_transformers.backends import check_settings, served  # noqa: PLC0415
    from kvdock_transformers.demo.command import (  # noqa: PLC0415
        check_writable,
        cleaning_up_when_terminated,
        models_of,
        pairs_of,
    )
    from kvdock_transformers.demo.send.choice import (  # noqa: PLC0415
        choose_direct,
        settings_of,
    )
    from kvdock_transformers.demo.send.presentation import (  # noqa: PLC0415
        SendDisplay,
        as_object,
    )
    from kvdock_transformers.demo.send.trial import (  # noqa: PLC0415
        SendRequest,
        run_sending,
    )

    families, scale = models_of(model, size)
    dock = Dock.load(require=(backend,) if backend else ())
    choice = choose_direct(dock, backend)
    given = settings_of(dock, choice.backend, pairs_of(set_))
    check_settings(dock, choice.backend, given)
    if directory is not None:
        check_writable(directory)
    display = SendDisplay(to_stderr=as_json)
    with (
        cleaning_up_when_terminated(),
        tempfile.TemporaryDirectory(prefix="kvdock-demo-") as temporary,
        served(choice.backend, given) as (settings, notice),
        display,
    ):
        request = SendRequest(
            families=families,
            directory=directory or Path(temporary),
            backend=choice.backend,
            scale=scale,
            settings=settings,
        )
        display.begin(request, choice, notice)
        results = run_sending(request, display.show)
    display.end(results)
    if as_json:
        sys.stdout.write(as_object(results, choice, notice) + "\n")
    return 0 if all(result.ok for result in results) else 1

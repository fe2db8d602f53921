"""Read the metrics of an engine: text as Prometheus serves it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus

from kvdock.errors import KvdockError
from kvdock_cli.http_request import request

Labels = Mapping[str, str]


class Samples:
    """The samples of one answer that begin with `kvdock_`, or `vllm:kvdock_`."""

    def __init__(self, text: str) -> None:
        from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415 - 50 ms that other commands save

        self._found: dict[str, list[tuple[Labels, float]]] = {}
        with suppress(ValueError):  # it is no such text
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    name = sample.name.rpartition(":")[2]
                    if name.startswith("kvdock_"):
                        row = (sample.labels, float(sample.value))
                        self._found.setdefault(name, []).append(row)

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self._found)

    def of(self, name: str, **wanted: str) -> list[tuple[Labels, float]]:
        """Return the samples of a metric that have these labels."""
        return [
            (labels, value)
            for labels, value in self._found.get(name, [])
            if wanted.items() <= labels.items()
        ]

    def numbers(self, name: str, **wanted: str) -> list[float]:
        """Return the values of these samples."""
        return [value for _, value in self.of(name, **wanted)]

    def total(self, name: str, **wanted: str) -> float:
        """Return the sum of these samples."""
        return sum(self.numbers(name, **wanted))

    def most(self, name: str, **wanted: str) -> float:
        """Return the largest of these samples; 0 if there is none."""
        return max(self.numbers(name, **wanted), default=0.0)

    def pairs(self, name: str, *labels: str) -> list[tuple[str, ...]]:
        """Return the values that some labels have together in a metric, sorted."""
        samples = self.of(name)
        return sorted(
            {tuple(every.get(one, "") for one in labels) for every, _ in samples}
        )

    def values(self, label: str, *names: str) -> list[str]:
        """Return the values of a label in some metrics, sorted; none is empty."""
        found = {value for name in names for (value,) in self.pairs(name, label)}
        return sorted(found - {""})


def fetch(url: str) -> Samples:
    """Ask an engine for its metrics once.

    Args:
        url: Where it serves them, "http://host:port/metrics"; the path may be
            left out.

    Raises:
        SettingsError: If it is not such a URL.
        KvdockError: If nothing answers there, or not with metrics of kvdock.
    """
    status, text = request(url, default_path="/metrics", wanted="metrics")
    if status != HTTPStatus.OK:
        raise KvdockError(
            f"no metrics come from {url}: status {status}",
            fix="Name the path of the metrics, such as /metrics.",
        )
    found = Samples(text)
    if not found:
        raise KvdockError(
            f"{url} serves no metrics of kvdock",
            fix='Switch them on with core.observers = ["metrics"].',
        )
    return found

"""Write the alerts as a PrometheusRule, for the operator of Prometheus.

Usage: python docs/fill_rules.py [--check]

With --check nothing is written, and the exit status says whether anything would be.
"""

from __future__ import annotations

import sys

import yaml
from generated import DOCS, write_or_compare

ALERTS = DOCS / "prometheus" / "alerts.yml"
RULES = DOCS.parent / "deploy" / "monitoring" / "rules.yaml"


def main(arguments: list[str]) -> None:
    """Write the manifest, or compare it."""
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "kvdock"},
        "spec": yaml.safe_load(ALERTS.read_text()),
    }
    head = "# From docs/prometheus/alerts.yml: python docs/fill_rules.py\n"
    text = head + yaml.safe_dump(rule, sort_keys=False, width=88)
    write_or_compare({RULES: text}, arguments)


if __name__ == "__main__":
    main(sys.argv[1:])

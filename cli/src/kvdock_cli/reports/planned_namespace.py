"""The report of `kvdock route --namespace`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from kvdock_cli.reports._report import Block, Column, Report, Table, Text
from kvdock_cli.reports._style import Tone
from kvdock_cli.reports._tables import Cell
from kvdock_cli.reports.store import SHORT

if TYPE_CHECKING:
    from kvdock.launch import NamespacePlan
    from kvdock.namespace import Difference

_COLUMNS = (
    Column("field", "field", fold=True),
    Column("there", "left", fold=True),
    Column("command", "right", fold=True),
)
_POOLS = "pools"


@attrs.frozen
class Compared:
    """A stored or planned namespace beside that of a command.

    Args:
        namespace: Its digest, or the file that it was read from.
        differences: The fields in which the two differ, its value on the left.
        loaded: Those that one of them knows, because its engine has loaded its model.
    """

    namespace: str
    differences: Sequence[Difference]
    loaded: Sequence[Difference]


def report(
    plan: NamespacePlan, compared: Mapping[str, Compared | None], target: str
) -> Report:
    """Report whose pages an engine would find; all is well if it finds those there."""
    blocks: list[Block] = []
    for name, nearest in compared.items():
        blocks += _one(name, nearest, target)
    ok = not any(nearest and nearest.differences for nearest in compared.values())
    data = {
        "against": target,
        "records": plan.records,
        "loaded": plan.loaded,
        "compared": compared,
    }
    return Report("kvdock.route-namespace/1", data, blocks, ok)


def _one(name: str, nearest: Compared | None, target: str) -> list[Block]:
    lead = f"{name}: "
    if nearest is None:
        what = f"{target} holds no namespace yet" if target else "no store is named"
        return [Text(f"there is nothing to compare with, {what}.", Cell(lead))]
    digest = nearest.namespace[:SHORT]
    if nearest.differences:
        said = f"a new namespace. The nearest, {digest}, differs in what follows."
        blocks: list[Block] = [Text(said, Cell(lead, Tone.BAD))]
        blocks.append(Table(_COLUMNS, nearest.differences, indent=2))
    else:
        said = f"the namespace {digest}, by all that the command says."
        blocks = [Text(said, Cell(lead, Tone.GOOD))]
    shown = [one for one in nearest.loaded if not one.field.startswith(f"{_POOLS}.")]
    pools = "Its pools are compared when the engine has loaded the model"
    if len(shown) < len(nearest.loaded):
        blocks.append(Text(f"{pools}{', and:' if shown else '.'}", indent=2))
    elif shown:
        blocks.append(Text("Compared when the engine has loaded the model:", indent=2))
    return [*blocks, Table(_COLUMNS, shown, indent=4)] if shown else blocks

"""`inspect --html` and `diff --html`: a report in one file. The page sends no requests."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from megaconv.commands.comparison import Diff
from megaconv.commands.inspected import Inspection
from megaconv.commands.movement import Movement
from megaconv.commands.survey import Survey
from megaconv.commands.views import layout
from megaconv.commands.views.look import data_of, filled, part
from megaconv.commands.views.moved_modules import maps, modules
from megaconv.commands.views.tree import tree
from megaconv.engine.statistics import Statistics
from megaconv.errors import LayoutError
from megaconv.model.ir import WEIGHT, Header, Key, TensorInfo

SCRIPTS = (
    "basics.js", "elements.js", "treemap.js", "ranks.js", "layers.js", "histograms.js", "heat.js", "tensors.js", "report.js",
)  # fmt: skip
"""The page's script, in the order in which its parts use each other."""


def report(found: Inspection | Survey, stats: Mapping[str, Statistics]) -> str:
    """The page of a report. stats: statistics of the tensors, if the user asked for them."""
    rows = _rows(found, stats)
    return _page(found.path, found.lines(), rows, STATISTICS, _layout(found))


def movement_report(a: str, b: str, left: Header, found: Diff, moved: Movement) -> str:
    """The page that shows how far B has moved from A. left: header of A, whose tensors are listed."""
    stats = {tensor.name: {"stats": tensor.to_json()} for tensor in moved.tensors}
    described = _described(
        (key.name, info.shape, info.dtype, info.nbytes) for key, info in weights_of(left)
    )
    rows = [row | stats.get(row["name"], {}) for row in described]
    layers = [{"name": layer.name, "stats": layer.to_json()} for layer in moved.layers()]
    different = f"{len(found.differences)} of {found.tensors} differ"
    facts = [("A", a), ("B", b), ("tensors", different)]
    if len(found.slots) > 1:
        facts.append(("compared", ", ".join(found.slots)))
    for name, ours, theirs in found.config:
        facts.append(("configuration", f"{name} is {ours!r} in A, {theirs!r} in B"))
    return _page(
        f"{b}, moved from {a}",
        facts,
        rows,
        MOVEMENT,
        layers=layers,
        modules=modules((row["name"] for row in described), found, moved),
        maps=maps(moved),
    )


class Numbers(NamedTuple):
    """The numbers of a tensor that a page shows."""

    about: str
    measures: Mapping[str, str]
    """Numbers that are plotted by layer, each with its label in the selection."""
    columns: Sequence[str]
    """Numbers in the columns of the table."""


STATISTICS = Numbers(
    "Statistics by layer",
    {"std": "standard deviation", "mean": "mean", "min": "minimum", "max": "maximum"},
    ("mean", "std", "min", "max", "zeros", "nan", "infinite"),
)
MOVEMENT = Numbers(
    "How far it has moved, by layer",
    {
        "relative": "norm of B − A over the norm of A",
        "max_abs": "largest difference",
        "changed": "share of elements changed",
    },
    ("relative", "max_abs", "changed"),
)


def _page(
    title: str,
    facts: Iterable[tuple[str, str]],
    rows: list[dict[str, Any]],
    numbers: Numbers,
    layout: dict[str, Any] | None = None,
    layers: Sequence[dict[str, Any]] = (),
    modules: Sequence[dict[str, Any]] = (),
    maps: Sequence[dict[str, Any]] = (),
) -> str:
    """The HTML page. layers: numbers of whole layers with their names. modules, maps: as in moved_modules."""
    document = {
        "path": title,
        "facts": [list(line) for line in facts],
        "tree": tree({row["name"]: (row["parameters"], row["bytes"]) for row in rows}).to_json(),
        "layout": layout,
        "tensors": rows,
        "layers": list(layers),
        "modules": list(modules),
        "maps": list(maps),
        **numbers._asdict(),
    }
    script = "".join(part(name) for name in SCRIPTS)
    return filled("report.html", {"SCRIPT": script, "DATA": data_of(document)})


def _layout(found: Inspection | Survey) -> dict[str, Any] | None:
    if isinstance(found, Survey):
        return None
    try:
        view = layout.layout_view(found.header)
    except LayoutError:  # a run whose ranks share tensors that this calculation divides
        return None
    return {**view.to_json(), "kinds": view.kinds()}


def _rows(found: Inspection | Survey, stats: Mapping[str, Statistics]) -> list[dict[str, Any]]:
    if isinstance(found, Survey):
        listed = [
            (tensor.name, tensor.shape, tensor.dtype, tensor.nbytes) for tensor in found.tensors
        ]
    else:
        listed = [
            (key.name, info.shape, info.dtype, info.nbytes)
            for key, info in weights_of(found.header)
        ]
    return [
        row | ({"stats": stats[row["name"]].to_json()} if row["name"] in stats else {})
        for row in _described(listed)
    ]


def weights_of(header: Header) -> Iterator[tuple[Key, TensorInfo]]:
    return ((key, info) for key, info in header.manifest.items() if key.slot == WEIGHT)


def _described(listed: Iterable[tuple[str, Sequence[int], str, int]]) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "shape": list(shape),
            "dtype": dtype,
            "parameters": prod(shape),
            "bytes": nbytes,
        }
        for name, shape, dtype, nbytes in listed
    ]

"""`inspect --html`: a report in one file, which asks nobody for anything: no request leaves the page."""

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from megaconv.commands.inspection import Inspection
from megaconv.commands.survey import Survey
from megaconv.commands.views import layout
from megaconv.commands.views.tree import tree
from megaconv.engine.statistics import Statistics
from megaconv.errors import LayoutError
from megaconv.model.ir import WEIGHT

TEMPLATE = Path(__file__).with_name("report.html")


def report(found: Inspection | Survey, stats: Mapping[str, Statistics]) -> str:
    """The page. stats: of the tensors, where somebody asked for them."""
    rows = _rows(found, stats)
    document = {
        "path": found.path,
        "facts": [list(line) for line in found.lines()],
        "tree": tree({row["name"]: (row["parameters"], row["bytes"]) for row in rows}).to_json(),
        "layout": _layout(found),
        "tensors": rows,
    }
    # A name may hold anything, also what ends a script; as an escape it is the same JSON.
    data = json.dumps(document).replace("<", "\\u003c")
    return TEMPLATE.read_text(encoding="utf-8").replace("__DATA__", data)


def _layout(found: Inspection | Survey) -> dict[str, Any] | None:
    if isinstance(found, Survey):
        return None
    try:
        return layout.layout_view(found.header).to_json()
    except LayoutError:  # of a run whose ranks share what our arithmetic divides
        return None


def _rows(found: Inspection | Survey, stats: Mapping[str, Statistics]) -> list[dict[str, Any]]:
    if isinstance(found, Survey):
        listed = [(tensor.name, tensor.shape, tensor.dtype, tensor.nbytes) for tensor in found.tensors]
    else:
        manifest = found.header.manifest.items()
        listed = [(key.name, info.shape, info.dtype, info.nbytes) for key, info in manifest if key.slot == WEIGHT]
    return [
        {"name": name, "shape": list(shape), "dtype": dtype, "parameters": prod(shape), "bytes": nbytes}
        | ({"stats": stats[name].to_json()} if name in stats else {})
        for name, shape, dtype, nbytes in listed
    ]

"""`megatron-lite models`: prints the families of megaconv, and the reasons for everything that can't be trained."""

import argparse
import json
from collections.abc import Sequence
from typing import Any

from megaconv.families import families
from megaconv.families.parts.unsupported import UNSUPPORTED
from megatron_lite.models.trainable import (
    CONVERTED_ONLY,
    NOT_COMPUTED,
    RETRO,
    ROPE_SCALINGS,
    TRAINED,
)
from megatron_lite.settings.architecture import OF_THEIR_OWN
from megatron_lite.settings.flag_parser import FlagParser

EXAMPLES = """examples:
  megatron-lite models
  megatron-lite models --json | jq -r '.families[] | select(.trained).name'
"""


def table() -> str:
    """Return a Markdown table with a line for each family. Families that can't be trained can be converted."""
    lines = ["| family | architectures | trained |", "|---|---|---|"]
    for name, family in sorted(families().items()):
        architectures = ", ".join(family.architectures) or "Megatron core alone"
        trained = "yes" if _is_trained(name) else "no"
        lines.append(f"| {name} | {architectures} | {trained} |")
    return "\n".join(lines) + "\n"


def reasons() -> str:
    """Return three lists: the parts of models that can't be trained, the families that are only converted, and the
    architectures that are refused, by reason."""
    lines = ["Not trained, whatever the family:", ""]
    lines += [f"- a model with {part}" for part in NOT_COMPUTED.values()]
    lines.append(f"- rope scaling of another kind than {', '.join(ROPE_SCALINGS)}")
    lines += ["", "Families that are converted, and not trained:", ""]
    lines += [f"- {name}: {parts}" for name, parts in CONVERTED_ONLY.items()]
    lines += ["", "Architectures that are refused:", ""]
    by_reason: dict[str, list[str]] = {}
    for architecture, reason in UNSUPPORTED.items():
        by_reason.setdefault(reason, []).append(architecture)
    lines += [f"- {', '.join(names)}: {reason}" for reason, names in by_reason.items()]
    return "\n".join(lines) + "\n"


def to_json() -> dict[str, Any]:
    """Return the content of `table` and `reasons` for programs."""
    return {
        "families": [
            {
                "name": name,
                "architectures": list(family.architectures),
                "trained": _is_trained(name),
            }
            for name, family in sorted(families().items())
        ],
        "not_trained": list(NOT_COMPUTED.values()),
        "rope_scalings": list(ROPE_SCALINGS),
        "converted_only": dict(CONVERTED_ONLY),
        "refused_architectures": dict(UNSUPPORTED),
    }


def _is_trained(family: str) -> bool:
    return family in (*TRAINED, *OF_THEIR_OWN, RETRO)


def main(words: Sequence[str]) -> int:
    """Run the command and return the exit status."""
    parser = FlagParser(
        prog="megatron-lite models",
        description="List the families of models, and which of them can be trained.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    if parser.parse_args(words).json:
        print(json.dumps(to_json(), indent=1))
    else:
        print(table(), reasons(), sep="\n", end="")
    return 0

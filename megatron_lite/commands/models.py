"""`megatron-lite models`: prints the families of megaconv, and the reasons for everything that can't be trained."""

from collections.abc import Sequence

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


def table() -> str:
    """Return a Markdown table with a line for each family. Families that can't be trained can be converted."""
    lines = ["| family | architectures | trained |", "|---|---|---|"]
    for name, family in sorted(families().items()):
        architectures = ", ".join(family.architectures) or "Megatron core alone"
        lines.append(f"| {name} | {architectures} | {_trained(name)} |")
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


def _trained(family: str) -> str:
    return "yes" if family in (*TRAINED, *OF_THEIR_OWN, RETRO) else "no"


def main(words: Sequence[str]) -> int:
    FlagParser(prog="megatron-lite models", description="Lists the families of models.").parse_args(
        words
    )
    print(table(), reasons(), sep="\n", end="")
    return 0

"""`megatron-lite models`: prints the families of megaconv and whether they can be trained."""

import argparse
from collections.abc import Sequence

from megaconv.families import families
from megatron_lite.models.trainable import RETRO, TRAINED
from megatron_lite.settings.architecture import OF_THEIR_OWN


def table() -> str:
    """Return a Markdown table with a line for each family. Families that can't be trained can be converted."""
    lines = ["| family | architectures | trained |", "|---|---|---|"]
    for name, family in sorted(families().items()):
        architectures = ", ".join(family.architectures) or "Megatron core alone"
        lines.append(f"| {name} | {architectures} | {_trained(name)} |")
    return "\n".join(lines) + "\n"


def _trained(family: str) -> str:
    return "yes" if family in (*TRAINED, *OF_THEIR_OWN, RETRO) else "no"


def main(words: Sequence[str]) -> int:
    argparse.ArgumentParser(
        prog="megatron_lite models", description="Lists the families of models."
    ).parse_args(words)
    print(table(), end="")
    return 0

"""Which of megaconv's families can be trained, as a table for people: `megatron-lite models`."""

import argparse
from collections.abc import Sequence

from megaconv.families import families
from megatron_lite.models.plan import NETWORKS_OF_THEIR_OWN, TRAINED


def table() -> str:
    """Markdown, a line for each family; those that are not trained can be converted."""
    trained = {*TRAINED, *NETWORKS_OF_THEIR_OWN}
    lines = ["| family | architectures | trained |", "|---|---|---|"]
    for name, family in sorted(families().items()):
        lines.append(f"| {name} | {', '.join(family.architectures)} | {'yes' if name in trained else 'no'} |")
    return "\n".join(lines) + "\n"


def main(words: Sequence[str]) -> int:
    argparse.ArgumentParser(prog="megatron_lite models", description="Lists the families of models.").parse_args(words)
    print(table(), end="")
    return 0

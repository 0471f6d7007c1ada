"""`megatron-lite recipes`: list the recipes, or print one of them."""

import argparse
import json
import sys

from megaconv.errors import CheckpointError, UsageError
from megaconv.terminal import show
from megatron_lite.settings.flag_parser import FlagParser
from megatron_lite.settings.recipes import description, names, recipe_path

EXAMPLES = """examples:
  megatron-lite recipes
  megatron-lite recipes --json | jq 'keys'
  megatron-lite recipes llama3-8b-lora > mine.yaml
  megatron-lite finetune meta-llama/Llama-3.1-8B-Instruct chats.jsonl --recipe llama3-8b-lora --save tuned
"""


def main(words: list[str]) -> int:
    """Run the command and return the exit status. Raises UsageError for wrong flags."""
    parser = FlagParser(
        prog="megatron-lite recipes",
        description="List the recipes: settings for common models. With NAME, print the YAML file.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", metavar="NAME")
    parser.add_argument("--json", action="store_true", help="the list for programs")
    given = parser.parse_args(words)
    name = given.name
    if given.json and name is not None:
        raise UsageError(
            f"--json is for the list; leave it out to print {name}, or leave {name} out"
        )
    if given.json:
        print(json.dumps({each: description(each) for each in names()}, indent=1))
        return 0
    if name is None:
        width = max(map(len, names()))
        for each in names():
            show(f"{each:{width}}  {description(each)}")
        return 0
    try:
        print(recipe_path(name).read_text(encoding="utf-8"), end="")
    except CheckpointError as error:
        show(f"megatron-lite: error: {error}", sys.stderr)
        return error.exit_status
    return 0

"""Flags of the model and of training, which Megatron's create_doc_index.py has, on the command line of `embed`.

Flags of the model have to agree with the checkpoint. The others have no effect on vectors, and are named.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from megaconv.terminal import show
from megatron_lite.settings.arguments import parse
from megatron_lite.settings.config import flags
from megatron_lite.settings.earlier_flags import with_todays_flags
from megatron_lite.settings.flag_parser import FlagParser


def parse_with_model_flags(parser: FlagParser, words: Sequence[str]) -> argparse.Namespace:
    """Return the values of `embed`, with the flags of the model as `training`. Raises UsageError for an unknown flag."""
    given, rest = parser.parse_known_args(with_todays_flags(words, "embed"))
    settings, ignored = parse("pretrain", rest, beside=parser)
    given.training = settings
    names = sorted(name for name in settings.given if flags()[name][0] != "model")
    others = [*ignored, *(f"--{name.replace('_', '-')}" for name in names)]
    if others and os.environ.get("RANK", "0") == "0":
        show(f"without effect here: {', '.join(others)}", sys.stderr)
    return given

"""The argument parser of all commands but `pretrain` and `finetune`. It does not import torch, so that --help needs none."""

import argparse
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from typing import NoReturn

from megaconv.errors import UsageError

_UNKNOWN = "unrecognized arguments: "
"""The beginning of argparse's message about unknown words."""


class FlagParser(argparse.ArgumentParser):
    """An argument parser that raises UsageError instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix(_UNKNOWN)
        meant = [] if unknown == message else list(self.nearest(unknown.split()))
        hint = f"did you mean {', '.join(meant)}? --help" if meant else "--help"
        raise UsageError(f"{message}; {hint} lists all flags")

    def nearest(self, words: Iterable[str]) -> Iterator[str]:
        """Yield the flag that is most like each unknown one, with its short spelling."""
        known = self._option_string_actions
        for word in words:
            flag = word.partition("=")[0]
            near = get_close_matches(flag, known, n=1, cutoff=0.75) if flag[:2] == "--" else []
            for name in near:
                short = min(known[name].option_strings, key=len)
                yield name if short == name else f"{name} ({short})"

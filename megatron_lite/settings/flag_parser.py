"""The argument parser of all commands but `pretrain` and `finetune`. It does not import torch, so that --help needs none."""

import argparse
import difflib
from collections.abc import Iterator
from typing import NoReturn

from megaconv.errors import UsageError


class FlagParser(argparse.ArgumentParser):
    """An argument parser that raises UsageError instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        meant = list(self._similar_flags(message))
        hint = f"did you mean {', '.join(meant)}? --help" if meant else "--help"
        raise UsageError(f"{message}; {hint} lists all flags")

    def _similar_flags(self, message: str) -> Iterator[str]:
        """The known flag that is most like each unknown one. message: argparse's own."""
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown == message:
            return
        for word in unknown.split():
            if word.startswith("--"):
                flag = word.partition("=")[0]
                yield from difflib.get_close_matches(
                    flag, self._option_string_actions, n=1, cutoff=0.75
                )

"""The message of an error in the words of a command line: one line, with the nearest name that exists.

Typer's own message has three lines. Its suggestion may be a long option of another subject.
"""

import re
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

_FULL_NAMES = {
    "--tp": "tensor", "--pp": "pipeline", "--vpp": "virtual-pipeline", "--ep": "expert", "--etp": "expert-tensor",
    "--cp": "context",
}  # fmt: skip
"""Short options of parallel sizes -> the full words of their subject."""
_LONG_FORMS = {"average": "megaconv convert --average", "merge": "megaconv convert --adapter"}
"""Commands that are short for `convert` -> their long forms, which have all options of `convert`."""
TRAINER_COMMANDS = frozenset((
    "pretrain", "finetune", "preprocess", "data", "generate", "chat", "score", "serve", "evaluate", "calibrate", "rank-layers",
    "rank-experts", "rank-channels", "retro", "embed", "retrieve", "models", "recipes", "plot", "completion",
))  # fmt: skip
"""Commands that only megatron-lite has."""
OTHER_WORDS = {
    "checksum": "fingerprint", "compare": "diff", "export": "convert", "hash": "fingerprint", "info": "inspect",
    "prune": "convert --keep-channels", "quantize": "convert --quantize", "reshard": "convert", "show": "inspect", "sign": "seal",
    "split": "convert --tp", "upload": "push", "validate": "verify",
}  # fmt: skip
"""Words that other tools have for a command -> the command."""
_UNKNOWN_COMMAND = re.compile(r"no such command '([^']*)'")


def wrong_usage(error: Any) -> str:
    """Return the message of typer's error in one line, with a remedy. error: a UsageError of typer's click."""
    message = _in_plain_words(error.format_message()).rstrip(".")
    message = message[0].lower() + message[1:]
    unknown = _UNKNOWN_COMMAND.match(message)
    if unknown and unknown[1] in TRAINER_COMMANDS:
        return f"{unknown[0]}; `megatron-lite {unknown[1]}` is a command of the trainer"
    if unknown and unknown[1] in OTHER_WORDS:
        return f"{unknown[0]}; `megaconv {OTHER_WORDS[unknown[1]]}` does that"
    if error.ctx is None or message.endswith("?"):
        return message.replace("'. Did", "'; did")
    command = "megaconv" if error.ctx.parent is None else f"megaconv {error.ctx.command.name}"
    if hasattr(error, "possibilities"):
        elsewhere = _elsewhere(error) or _nearest(error)
        return f"no option {error.option_name}; {elsewhere}`{command} --help` lists the options"
    return f"{message}; `{command} --help` describes the command"


def _elsewhere(error: Any) -> str:
    """Return the long form of the command with the word that it has the option, or nothing."""
    longer = _LONG_FORMS.get(error.ctx.command.name)
    if longer is None:
        return ""
    convert = error.ctx.parent.command.get_command(error.ctx.parent, "convert")
    is_known = any(
        error.option_name in (*each.opts, *each.secondary_opts) for each in convert.params
    )
    return f"`{longer}` has it; " if is_known else ""


def _nearest(error: Any) -> str:
    """Return `did you mean --tp? `, or nothing."""
    known = dict(_spellings(error.ctx.command.params))
    near = get_close_matches(error.option_name, known, n=1, cutoff=0.75)
    return f"did you mean {known[near[0]]}? " if near else ""


def _spellings(parameters: Any) -> Iterator[tuple[str, str]]:
    """Yield (a spelling of an option, its shortest spelling) for each option that --help shows."""
    for each in parameters:
        spelled = [name for name in each.opts if name.startswith("--")]
        if not spelled or each.hidden:
            continue
        shortest = min(spelled, key=len)
        yield from ((name, shortest) for name in (*spelled, *each.secondary_opts))
        subject = _FULL_NAMES.get(shortest)
        if subject is not None:
            yield f"--{subject}-parallel-size", shortest
            yield f"--{subject}-model-parallel-size", shortest


def _in_plain_words(message: str) -> str:
    """Typer's message, with a kind of number in place of the name of a type: `'two' is not a valid int range`."""
    numbers = {"int": "a whole number", "float": "a number"}
    return re.sub(r"a valid (int|float)( range)?", lambda found: numbers[found[1]], message)

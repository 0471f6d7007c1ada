"""Converts a command line and a YAML file to Settings. Flags, their help and their types come from config.py."""

import argparse
import difflib
import types
from collections.abc import Callable, Collection
from dataclasses import Field
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, get_args, get_type_hints

from megaconv.errors import UsageError
from megaconv.local_paths import local_word
from megatron_lite.settings.config import Settings, flags, make_settings, subjects
from megatron_lite.settings.earlier_flags import REPLACED, TODAY, refuse_all, with_todays_flags
from megatron_lite.settings.flag_parser import FlagParser
from megatron_lite.settings.megatron_flags import (
    ANY_NUMBER,
    NOT_YET,
    WITHOUT_EFFECT,
    refused_feature,
)
from megatron_lite.settings.recipes import recipe_path
from megatron_lite.settings.short_form import ALTERNATIVES, ShortForm

YAML_FLAGS = ("--yaml-cfg", "--config-file")

OTHERWISE_CALLED = {
    "--learning-rate": "--lr", "--max-steps": "--train-iters", "--num-train-epochs": "--epochs", "--max-seq-length": "--seq-length",
    "--max-length": "--seq-length", "--output-dir": "--save", "--model": "--load",
    "--model-name-or-path": "--load", "--per-device-train-batch-size": "--micro-batch-size", "--warmup-steps": "--lr-warmup-iters",
    "--reward-funcs": "--reward",
}  # fmt: skip
"""Flags of other trainers -> Megatron-LM's flags with the same meaning but a different spelling."""

EXAMPLES = {
    "pretrain": """examples:
  python -m megatron_lite pretrain --num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 512 \\
      --mock-data --vocab-size 1024 --micro-batch-size 4 --train-iters 100 --lr 3e-4 --save ckpt --resume
  torchrun --nproc-per-node 4 -m megatron_lite pretrain --yaml-cfg llama.yaml --tensor-model-parallel-size 2 \\
      --pipeline-model-parallel-size 2 --data-path corpus_text_document --bf16 --save ckpt --save-interval 500 --resume""",
    "finetune": """examples:
  torchrun --nproc-per-node 4 -m megatron_lite finetune --load Llama-2-7b --data-path answers_text_document --bf16 \\
      --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --global-batch-size 32 --train-iters 200 --lr 1e-5 --save tuned
  megatron_lite finetune --load tuned --finetune-data pairs.jsonl --dpo --lora-rank 16 --epochs 1 --save preferred
  megaconv convert --load-dir tuned --saver hf --save-dir Llama-2-7b-tuned""",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; --help-all lists all flags")


def parse(
    command: str,
    arguments: list[str],
    short: ShortForm | None = None,
    *,
    beside: FlagParser | None = None,
) -> tuple[Settings, list[str]]:
    """Return the settings, and the accepted flags that have no effect here.

    The command line overrides the YAML file, the file overrides a recipe, and a recipe overrides the defaults of the
    short form. Raises UsageError.

    beside: the parser of a command with flags of its own, which left the arguments over. A misspelt flag may be one
    of its flags.
    """
    known, rest = make_parser(command).parse_known_args(
        _with_last_batch(with_todays_flags(arguments))
    )
    ignored = _take_without_effect(
        rest,
        rotates=getattr(known, "position_embedding_type", None) == "rope",
        beside=beside,
    )
    values = vars(known)
    path, recipe = values.pop("yaml", None), values.pop("recipe", None)
    in_file = _read_yaml(path, ignored) if path else {}
    in_file = _without_alternatives(in_file, values)
    in_recipe = _read_yaml(str(recipe_path(recipe)), ignored) if recipe else {}
    in_recipe = _without_alternatives(in_recipe, in_file | values)
    if short is not None:
        in_recipe = _with_short_form(in_recipe, in_file | values, short)
    settings = make_settings(in_recipe | in_file | values)
    _check_masks(settings, ignored)
    return settings, ignored


def _check_masks(settings: Settings, ignored: list[str]) -> None:
    """Raise UsageError if Megatron would make no mask between documents, although a flag asks for it."""
    names = {word.rpartition(" ")[2].removeprefix("--").replace("-", "_") for word in ignored}
    if settings.data.reset_attention_mask and "no_create_attention_mask_in_dataloader" in names:
        raise UsageError(
            "--reset-attention-mask separates documents by a mask that Megatron doesn't make with "
            "--no-create-attention-mask-in-dataloader; leave one of them out"
        )


def _without_alternatives(values: dict[str, Any], overriding: dict[str, Any]) -> dict[str, Any]:
    """Return the settings without those that exclude an overriding one: epochs beside --train-iters, for example."""
    dropped: set[str] = set()
    for group in ALTERNATIVES:
        if group & overriding.keys():
            dropped |= group
    if "step_batch_size_schedule" in overriding:
        dropped |= {"global_batch_size", "rampup_batch_size"}
    return {name: value for name, value in values.items() if name not in dropped}


def _with_short_form(
    recipe: dict[str, Any], given: dict[str, Any], short: ShortForm
) -> dict[str, Any]:
    """Return the settings of a recipe and of the short form. MODEL takes the place of the recipe's model."""
    own = {name: value for name, value in recipe.items() if name != "load"}
    return short.settings(own | given) | own


def _with_last_batch(words: list[str]) -> list[str]:
    """Rename --keep-last without a number to --keep-last-batch.

    In Megatron's tasks, --keep-last refers to a batch and has no number. Here, --keep-last refers to checkpoints and
    has one.
    """
    following = [*words, "--"][1:]
    return [
        "--keep-last-batch" if word == "--keep-last" and after.startswith("--") else word
        for word, after in zip(words, following, strict=True)
    ]


def make_parser(command: str) -> argparse.ArgumentParser:
    """Return the parser of a command, with a flag for each setting."""
    parser = _Parser(
        prog=f"megatron-lite {command}", usage=f"torchrun --nproc-per-node N -m megatron_lite {command} [FLAGS]",
        description=f"{DESCRIPTIONS[command]} Flags are Megatron-LM's.", epilog=EXAMPLES[command],
        formatter_class=argparse.RawDescriptionHelpFormatter, argument_default=argparse.SUPPRESS, allow_abbrev=False, add_help=False,
    )  # fmt: skip
    parser.add_argument(
        *YAML_FLAGS,
        dest="yaml",
        type=local_word,
        metavar="PATH",
        help="the same settings from a YAML file; the command line wins",
    )
    parser.add_argument(
        "--recipe",
        metavar="NAME",
        help="settings for a common model; `megatron-lite recipes` lists the names; all other flags win",
    )
    hints = type_hints()
    for kind in subjects().values():
        group = parser.add_argument_group(kind.__doc__)
        for name, (_, item) in flags().items():
            if name in kind.__dataclass_fields__:
                _add(group, name, item, hints[name])
    return parser


DESCRIPTIONS = {
    "pretrain": "Train a model from the start, or continue a run at any parallel layout.",
    "finetune": "Train on from the weights of any checkpoint that megaconv reads.",
}


@cache
def type_hints() -> dict[str, Any]:
    """Return the type of every setting, without its `| None`."""
    found = {}
    for kind in subjects().values():
        for name, hint in get_type_hints(kind).items():
            members = [member for member in get_args(hint) if member is not types.NoneType]
            found[name] = members[0] if isinstance(hint, types.UnionType) else hint
    return found


def _add(group: argparse._ArgumentGroup, name: str, item: Field[Any], hint: Any) -> None:
    text: str = item.metadata["help"]
    choices = item.metadata["choices"]
    short = item.metadata["short"]
    element = _element(hint)
    options: dict[str, Any] = {"metavar": {int: "N", float: "X"}.get(element, "WORD")}
    if hint is bool:
        options |= {"nargs": "?", "const": True, "metavar": "true|false"}
    elif choices:
        options["choices"] = choices
        text += " {" + ", ".join(choices) + "}"
    elif hint not in (int, float, str):
        options["nargs"] = "+"
    if item.default not in (None, False):
        text += f" [{_shown(item.default)}]"
    names = ["--" + name.replace("_", "-")]
    if short:
        names.append(short)
    group.add_argument(
        *names,
        dest=name,
        type=_reader(element, choices),
        help=text.replace("%", "%%"),
        **options,
    )


def _shown(default: Any) -> str:
    """Return the default as it would be written on a command line."""
    if isinstance(default, tuple):
        return " ".join(map(_shown, default))
    return f"{default:g}" if isinstance(default, float) else str(default)


def _element(hint: Any) -> Any:
    """Return int for both int and tuple[int, ...]."""
    # isinstance(tuple[int, ...], type) is true in Python 3.10.
    return get_args(hint)[0] if get_args(hint) else hint


def _reader(kind: type, choices: Collection[str] = ()) -> Callable[[str], Any]:
    """Return the function that reads a word. A choice is accepted in any case."""
    if kind is bool:
        return _boolean
    if not choices:
        return kind
    known = {choice.casefold(): choice for choice in choices}
    return lambda word: known.get(word.casefold(), word)


def _boolean(word: str) -> bool:
    if word.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"expected true or false, found {word!r}")
    return word.lower() == "true"


def _take_without_effect(
    rest: list[str], *, rotates: bool, beside: FlagParser | None = None
) -> list[str]:
    """Return the flags without effect. Raises UsageError for all other flags, with suggestions.

    rotates: positions are rotary, so --no-position-embedding has no effect. beside: as in parse().
    """
    ignored, refused, position = list[str](), list[str](), 0
    choosing_nothing = WITHOUT_EFFECT | ({"no_position_embedding": 0} if rotates else {})
    while position < len(rest):
        word, equals, value = rest[position].partition("=")
        name = word.removeprefix("--").replace("-", "_")
        following = rest[position + 1 :]
        count = choosing_nothing.get(name, 1 if name in NOT_YET else ANY_NUMBER)
        values = 0 if equals else _values(count, following)
        if not word.startswith("--"):
            refused.append(_unknown(word, beside))
        elif name in NOT_YET:
            _require_only(name, value or "".join(following[:1]))
            ignored.append(word)
        elif name in choosing_nothing:
            ignored.append(word)
        else:
            refused.append(_refused(word, name) or _unknown(word, beside))
        position += 1 + values
    refuse_all(refused)
    return ignored


def _values(count: int, following: list[str]) -> int:
    if count != ANY_NUMBER:
        return count
    return next((at for at, word in enumerate(following) if word.startswith("--")), len(following))


def _require_only(name: str, value: object, where: str = "") -> None:
    if str(value) != NOT_YET[name]:
        raise UsageError(
            f"{where}--{name.replace('_', '-')} {value} is not available; leave it out, or give {NOT_YET[name]}"
        )


def _refused(word: str, name: str) -> str | None:
    if word in REPLACED:
        return f"{word}: {REPLACED[word]}"
    feature = refused_feature(name)
    return f"{word}: {feature} is not supported yet; leave it out" if feature else None


def _unknown(word: str, beside: FlagParser | None = None) -> str:
    """Return what to say of a word that no flag takes. beside: as in parse()."""
    listing = "--help-all" if beside is None else "--help"
    if not word.startswith("-"):
        return (
            f"{word!r} is not a flag or a flag's value; the words of `finetune MODEL DATA` come before all flags, "
            f"and {listing} lists the flags"
        )
    if word in TODAY:
        today = " ".join(TODAY[word])
        return f"unknown flag {word}; give {today}"
    meant = _of_command(word, beside) or _of_training(word)
    if meant is None:
        return f"unknown flag {word}; {listing} lists all flags"
    return f"unknown flag {word}; did you mean {meant}?"


def _of_command(word: str, beside: FlagParser | None) -> str | None:
    """Return the flag of a command's own that is most like an unknown one."""
    return None if beside is None else next(beside.nearest([word]), None)


def _of_training(word: str) -> str | None:
    """Return the flag of training that is most like an unknown one."""
    if word in OTHERWISE_CALLED:
        return _with_short(OTHERWISE_CALLED[word])
    known = ["--" + name.replace("_", "-") for name in flags()]
    known += [*YAML_FLAGS, "--recipe"]
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.75)
    return _with_short(close[0]) if close else None


def _with_short(flag: str) -> str:
    """Return a flag with its short spelling, if it has one: `--tensor-model-parallel-size (--tp)`."""
    name = flag.removeprefix("--").replace("-", "_")
    short = flags()[name][1].metadata["short"] if name in flags() else None
    return f"{flag} ({short})" if short else flag


def _read_yaml(path: str, ignored: list[str]) -> dict[str, Any]:
    """Read a mapping of flags to values, with dashes or underscores. Subjects may be headings of their flags."""
    import yaml

    try:
        document = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: can't be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"{path}: is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict):
        raise UsageError(f"{path}: should be a mapping of flags to values")
    hints, values = type_hints(), {}
    for key, value in _flatten(document):
        name = str(key).replace("-", "_")
        if name in WITHOUT_EFFECT:
            if value is not None and value is not False:
                ignored.append(f"{path}: {key}")
        elif name in NOT_YET:
            _require_only(name, value, f"{path}: ")
        elif name not in hints:
            word = "--" + name.replace("_", "-")
            raise UsageError(f"{path}: {_refused(word, name) or _unknown(word)}")
        elif value is not None:
            values[name] = _convert(path, name, value, hints[name])
    return values


def _flatten(document: dict[Any, Any]) -> list[tuple[Any, Any]]:
    pairs: list[tuple[Any, Any]] = []
    for key, value in document.items():
        pairs += value.items() if key in subjects() and isinstance(value, dict) else [(key, value)]
    return pairs


def _convert(path: str, name: str, value: Any, hint: Any) -> Any:
    """Convert a YAML value with the function that reads flags, because YAML 1.1 reads 1e-4 as text."""
    choices = flags()[name][1].metadata["choices"]
    read = _reader(_element(hint), choices)
    try:
        if get_args(hint):
            words = value if isinstance(value, list) else str(value).split()
            found = [read(str(word)) for word in words]
        else:
            found = read(str(value))
    except (ValueError, argparse.ArgumentTypeError):
        raise UsageError(
            f"{path}: {name}: expected {getattr(hint, '__name__', hint)}, found {value!r:.60}"
        ) from None
    if choices and found not in choices:
        raise UsageError(f"{path}: {name}: choose one of {', '.join(choices)}; found {value!r:.60}")
    return found


def flag_table() -> str:
    """Return all flags as Markdown, for docs/trainer-flags.md."""
    lines = []
    for kind in subjects().values():
        lines += ["", f"## {kind.__doc__}", "", "| flag | description | default |", "|---|---|---|"]
        lines += [_table_row(name) for name in kind.__dataclass_fields__]
    return "\n".join(lines) + "\n"


def _table_row(name: str) -> str:
    """Return a flag's row of the table."""
    _, item = flags()[name]
    metadata = item.metadata
    spelled = [f"`--{name.replace('_', '-')}`"]
    if metadata["short"]:
        spelled.append(f"`{metadata['short']}`")
    text = metadata["help"].replace("|", "\\|")
    choices = [f"`{choice}`" for choice in metadata["choices"]]
    if choices:
        text += f" ({' · '.join(choices)})"
    default = ""
    if item.default not in (None, False):
        default = f"`{_shown(item.default)}`"
    return f"| {', '.join(spelled)} | {text} | {default} |"

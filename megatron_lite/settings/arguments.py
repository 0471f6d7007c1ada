"""Converts a command line to Settings. Flags, their help and their types come from config.py."""

import argparse
from dataclasses import Field
from typing import Any, NoReturn

from megaconv.errors import UsageError
from megaconv.local_paths import local_word
from megatron_lite.settings.config import Settings, flags, make_settings, subjects
from megatron_lite.settings.earlier_flags import with_todays_flags
from megatron_lite.settings.flag_parser import FlagParser
from megatron_lite.settings.recipes import recipe_path
from megatron_lite.settings.short_form import ALTERNATIVES, ShortForm
from megatron_lite.settings.training_commands import DESCRIPTIONS
from megatron_lite.settings.unknown_flags import RECIPE_FLAG, YAML_FLAGS, take_without_effect
from megatron_lite.settings.value_types import element_type, type_hints, value_reader
from megatron_lite.settings.yaml_file import read_yaml

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
    ignored = take_without_effect(
        rest,
        rotates=getattr(known, "position_embedding_type", None) == "rope",
        beside=beside,
    )
    values = vars(known)
    path, recipe = values.pop("yaml", None), values.pop("recipe", None)
    in_file = read_yaml(path, ignored) if path else {}
    in_file = _without_alternatives(in_file, values)
    in_recipe = read_yaml(str(recipe_path(recipe)), ignored) if recipe else {}
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
        RECIPE_FLAG,
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


def _add(group: argparse._ArgumentGroup, name: str, item: Field[Any], hint: Any) -> None:
    text: str = item.metadata["help"]
    choices = item.metadata["choices"]
    short = item.metadata["short"]
    element = element_type(hint)
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
        type=value_reader(element, choices),
        help=text.replace("%", "%%"),
        **options,
    )


def _shown(default: Any) -> str:
    """Return the default as it would be written on a command line."""
    if isinstance(default, tuple):
        return " ".join(map(_shown, default))
    return f"{default:g}" if isinstance(default, float) else str(default)


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

"""Parts of a transformers directory that are missing because a Megatron checkpoint doesn't contain them.

Megatron's own `--save` keeps neither tokenizer nor generation settings. megaconv's outputs have them in `hf/`.
"""

import json
from collections.abc import Iterable, Sequence

from formats.wording import counted
from megaconv.engine.plan import OutputPlan
from megaconv.engine.sidecars import read_sidecar
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.model.ir import Header

GENERATION = "generation_config.json"
EOS = "eos_token_id"
TOKENIZER = "tokenizer"

_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)


def missing_parts(header: Header, plan: OutputPlan) -> tuple[str, ...]:
    """Those of TOKENIZER, GENERATION and EOS that the output will lack; empty if the original's config.json is known.

    plan: the plan of an output without --base. With --base, the output would have them.
    """
    if header.layout is None or header.config.hf is not None or CONFIG_NAME not in plan.files:
        return ()
    there = {
        TOKENIZER: has_tokenizer(plan.files),
        GENERATION: GENERATION in plan.files,
        EOS: header.config.eos_token_id is not None,
    }
    return tuple(part for part, is_there in there.items() if not is_there)


def has_tokenizer(names: Iterable[str]) -> bool:
    """True if the names of a directory's files include a tokenizer's."""
    return any(name in _TOKENIZERS or name.endswith(".tiktoken") for name in names)


def tokens_without_rows(header: Header) -> tuple[str, ...]:
    """A notice if the tokenizer has added tokens beyond the model's vocabulary; empty if it has none, or can't be read.

    The vocabulary of a model whose tensors keep their names is unknown.
    """
    if header.config.own_names is not None:
        return ()
    added: dict[int, str] = {}
    for name, read in _ADDED.items():
        if name in header.made:
            added |= read(header.made[name].decode(errors="replace"))
        elif name in header.files:
            added |= read(read_sidecar(header.files[name]).decode(errors="replace"))
    beyond = sorted(token for token in added if token >= header.config.vocab)
    if not beyond:
        return ()
    first = beyond[0]
    return (
        f"the tokenizer has {counted(len(beyond), 'token')} without a row in the embedding, which has {header.config.vocab} rows: "
        f"{added[first]!r:.40} is token {first}. --vocab-size {beyond[-1] + 1} adds rows",
    )


def _added_in_tokenizer(text: str) -> dict[int, str]:
    """The added tokens of a tokenizer.json. They come before the vocabulary, which isn't parsed."""
    _, key, rest = text.partition('"added_tokens":')
    try:
        listed, _ = json.JSONDecoder().raw_decode(rest.lstrip()) if key else ([], 0)
        return {int(each["id"]): str(each["content"]) for each in listed}
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return {}


def _added_by_token(text: str) -> dict[int, str]:
    """The tokens of an added_tokens.json: {"<tool>": 32000}."""
    try:
        return {int(token): str(content) for content, token in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return {}


_ADDED = {"tokenizer.json": _added_in_tokenizer, "added_tokens.json": _added_by_token}


def completeness_notices(header: Header, missing: Sequence[str]) -> tuple[str, ...]:
    """Notices before the copy: which files come from another place, which parts are missing, and who has them."""
    taken = header.named_tokenizer and header.config.hf is None and header.files
    notices = []
    if taken:
        files = ", ".join(sorted(header.files))
        notices.append(
            f"from {header.named_tokenizer}, which the checkpoint's arguments name as its tokenizer: {files}"
        )
    if missing:
        hint = (
            f" (its arguments name the tokenizer {header.named_tokenizer})"
            if header.named_tokenizer and not taken
            else ""
        )
        notices.append(
            f"the output will have no {', no '.join(missing)}: the checkpoint doesn't hold them{hint}; "
            "--config ORIGINAL, the model's Hugging Face directory, completes it"
        )
    return tuple(notices)

"""The options for reading an input."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megaconv.options.commands import CONVERSIONS, CONVERT, ONE_INPUT, READERS, SERVE
from megaconv.options.option import INPUT_AND_OUTPUT, Range, normalize, option
from megaconv.options.shared import CONFIG, OWN_OPTIONS


@dataclass(frozen=True)
class LoadOptions:
    """Options for reading an input. None means: take it from the checkpoint."""

    config: Path | None = option(
        None,
        "--config",
        heading=INPUT_AND_OUTPUT,
        commands=(*CONVERSIONS, *SERVE, *READERS),
        **CONFIG,
    )
    """A Hugging Face directory whose configuration and tokenizer files complete a source that has none."""
    true_vocab_size: int | None = option(
        None,
        "--true-vocab-size",
        heading=INPUT_AND_OUTPUT,
        commands=(*CONVERT, *ONE_INPUT),
        range=Range(1),
        help="Vocabulary size without padding, where the source doesn't give it.",
    )
    checkpoint_type: str | None = option(
        None,
        "--checkpoint-type",
        heading=INPUT_AND_OUTPUT,
        help="Files of llama_mistral: it writes meta or mistral, and reads hf, meta or mistral (detected by default).",
    )
    """The format that the `llama_mistral` loader reads: `hf`, `meta` or `mistral`; None: detect it from the files."""
    text_only: bool = option(
        False,
        "--text-only",
        heading=INPUT_AND_OUTPUT,
        commands=(*CONVERT, *SERVE, "inspect", "plan", "fingerprint", "diff", "delta"),
        help="Take only the language model of a multimodal model (convert --base ORIGINAL puts the rest back).",
    )
    """Read only the language model of a multimodal model; for Hugging Face directories."""
    drop_retrieval: bool = option(
        False,
        "--drop-retrieval",
        heading=INPUT_AND_OUTPUT,
        commands=(*CONVERT, "inspect", "plan", "fingerprint"),
        help="Convert only the GPT inside a Retro, without retrieval.",
    )
    """Read only the GPT inside a Retro, without its cross attention and its encoder."""
    num_attention_heads: int | None = option(
        None,
        "--num-attention-heads",
        heading=INPUT_AND_OUTPUT,
        commands=(*CONVERT, *ONE_INPUT),
        range=Range(1),
        help="Attention heads, where the source doesn't store them: a GPT-2 of Megatron-LM's first release.",
    )
    extra: Mapping[str, str] = option((), "--option", commands=READERS, **OWN_OPTIONS)
    """The loader's own options, by the keys in its OPTIONS."""
    optimizer: bool = option(
        True,
        "--optimizer/--no-optimizer",
        commands=("fingerprint", "diff", "delta"),
        help="Read optimizer state too, where there is any.",
    )
    """True to read the optimizer's tensors, if the checkpoint has any."""
    cache: bool = option(
        False,
        "--cache",
        heading=INPUT_AND_OUTPUT,
        commands=(*CONVERSIONS, "fingerprint", "verify", "diff"),
        help="Download all files of a model on the Hub into its cache; by default, weights are read by ranges and not kept.",
    )
    """True to download files of the Hub, False to read their bytes when they are needed."""
    dtype: str | None = None
    """The dtype that quantized weights are dequantized to (`float32`); None: bfloat16."""
    metadata_only: bool = False
    """Read only the header. Files that merely repeat the names and shapes of other files need not be read."""
    own_names: bool = False
    """True to read a model that no family describes, with its tensors under their own names."""
    whole: bool = True
    """False to read a multimodal model as one that no family describes, if own_names allows it."""
    needs_weights: bool = True
    """True if the source must have weights. If False, names and shapes may come from a config.json alone."""

    def __post_init__(self) -> None:
        normalize(self)

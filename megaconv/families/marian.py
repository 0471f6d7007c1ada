"""Marian, the translation models of OPUS-MT: as BART, with computed positions (sines), and without norms after embeddings.

Models with two embeddings, or with two vocabularies, are refused: they have other tensors. Source: MarianConfig and
modeling_marian.py of transformers 5.24.
"""

from megaconv.errors import NotExpressible
from megaconv.families import Family
from megaconv.families.parts.bart_stacks import (
    BART_ALIASES,
    BART_FIXED,
    BART_IGNORED,
    BART_ONLY,
    BART_ROWS,
    COMPUTED_POSITIONS,
    bart_keys,
)
from megaconv.families.parts.keys import CONFIG_NAME, Fields, Keys, Raw, need_size

_VOCAB, _OF_DECODER = 58101, "decoder_vocab_size"


def _read_decoder_vocab(raw: Raw) -> Fields:
    vocab = need_size(raw, "vocab_size", _VOCAB)
    found = need_size(raw, _OF_DECODER, vocab)
    if found != vocab:
        raise NotExpressible(
            f"{CONFIG_NAME}: {_OF_DECODER} {found} is not supported in this architecture, only vocab_size {vocab} is"
        )
    return {}


_KEYS = (
    *bart_keys(
        vocab=_VOCAB, activation="gelu", scales=False, tokens=(None, 0, 58100), start="pad_token_id"
    ),
    Keys((_OF_DECODER,), _read_decoder_vocab, lambda config: {_OF_DECODER: config.vocab}),
)
_FIXED = {
    **BART_FIXED,
    "norm.place": "after_sum",
    "norm.final": False,
    "positions.kind": "sinusoidal",
    "head.bias": True,
}

FAMILY = Family(
    name="marian",
    architectures=("MarianMTModel",),
    model_type="marian",
    rows=BART_ROWS,
    keys=_KEYS,
    fixed=_FIXED,
    only={**BART_ONLY, "share_encoder_decoder_embeddings": True},
    aliases=BART_ALIASES,
    ignored=(*BART_IGNORED, *COMPUTED_POSITIONS),
    recognized=None,
    proven="names",
)

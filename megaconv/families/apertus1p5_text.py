"""The language model of Apertus 1.5: Apertus with tokens of images and sound, for which the head may have no rows.

Source: Apertus1p5TextConfig and modeling_apertus1p5.py of transformers 5.24.
"""

from dataclasses import replace

from megaconv.errors import CorruptCheckpoint
from megaconv.families.apertus import FAMILY as APERTUS
from megaconv.families.parts.keys import CONFIG_NAME, Fields, Keys, Raw, need_size
from megaconv.families.parts.row_changes import with_shorter_head
from megaconv.model.config import ModelConfig

_PREDICTED = "output_vocab_size"


def _read_predicted(raw: Raw) -> Fields:
    vocab = need_size(raw, "vocab_size")
    predicted = need_size(raw, _PREDICTED, vocab)
    if predicted > vocab:
        raise CorruptCheckpoint(
            f"{CONFIG_NAME}: {_PREDICTED} {predicted} is more than vocab_size {vocab}"
        )
    return {"head.unpredicted": vocab - predicted}


def _write_predicted(config: ModelConfig) -> Raw:
    return {_PREDICTED: config.predicted if config.head.unpredicted else None}


FAMILY = replace(
    APERTUS, name="apertus1p5_text", architectures=("Apertus1p5TextForCausalLM",), model_type="apertus1p5_text",
    rows=with_shorter_head(APERTUS.rows), keys=(*APERTUS.keys, Keys((_PREDICTED,), _read_predicted, _write_predicted)),
)  # fmt: skip

"""A second embedding of the tokens, with a part for each layer, as Gemma 3n and Gemma 4 have it: its rows and its keys.

    hf     model.{embed_tokens_per_layer, per_layer_model_projection, per_layer_projection_norm}
           model.layers.{l}.{per_layer_input_gate, per_layer_projection, post_per_layer_input_norm}
    core   layer_inputs.{word_embeddings, projection, norm}
           decoder.layers.{l}.layer_input.{gate, projection, norm}

A layer's part is the mean of this embedding and of a projection of the usual one. Megatron core has no such modules;
its names are those of the trainer's checkpoints.
"""

from megaconv.families.parts.keys import Fields, Keys, Raw, count, need_size
from megaconv.model.config import ModelConfig
from megaconv.model.table import Row

_HF, _CORE = "model.layers.{l}.", "decoder.layers.{l}.layer_input."
LAYER_INPUTS = (
    Row("layer_inputs.embed.weight", ("layer_input_vocab layers*layer_input_width",), tp=0, stage="first", when="layer_inputs",
        hf="model.embed_tokens_per_layer.weight",
        core="layer_inputs.word_embeddings.weight"),
    Row("layer_inputs.projection.weight", ("layers*layer_input_width hidden",), stage="first", when="layer_inputs",
        hf="model.per_layer_model_projection.weight",
        core="layer_inputs.projection.weight"),
    Row("layer_inputs.norm.weight", ("layer_input_width",), stage="first", when="layer_inputs",
        hf="model.per_layer_projection_norm.weight",
        core="layer_inputs.norm.weight"),
    Row("layers.{l}.layer_input.gate.weight", ("layer_input_width hidden",), when="layer_inputs",
        hf=_HF + "per_layer_input_gate.weight",
        core=_CORE + "gate.weight"),
    Row("layers.{l}.layer_input.projection.weight", ("hidden layer_input_width",), when="layer_inputs",
        hf=_HF + "per_layer_projection.weight",
        core=_CORE + "projection.weight"),
    Row("layers.{l}.layer_input_norm.weight", ("hidden",), when="layer_inputs",
        hf=_HF + "post_per_layer_input_norm.weight",
        core=_CORE + "norm.weight"),
)  # fmt: skip

_WIDTH, _VOCAB = "hidden_size_per_layer_input", "vocab_size_per_layer_input"
_COUNT = count(_WIDTH, "layer_inputs.width", 256)


def _read(raw: Raw) -> Fields:
    width = _COUNT.read(raw)
    vocab = need_size(raw, _VOCAB, 262144) if width["layer_inputs.width"] else 0
    return {**width, "layer_inputs.vocab": vocab}


def _write(config: ModelConfig) -> Raw:
    inputs = config.layer_inputs
    return {_WIDTH: inputs.width, _VOCAB: inputs.vocab or config.vocab}


LAYER_INPUT_KEYS = Keys((_WIDTH, _VOCAB), _read, _write)
"""The keys of this embedding, with the defaults of both classes. A width of 0 means that there is none."""

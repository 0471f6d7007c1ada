"""TensorRT-LLM's names for a family's tensors, as nvidia-modelopt 0.47 writes them.

    transformer.vocab_embedding.weight, transformer.position_embedding.weight     first stage, rows sharded
    transformer.layers.{l}.attention.qkv.weight                                   a rank's rows of q, of k, of v
    transformer.layers.{l}.mlp.fc.weight                                          the gate, to which the activation is applied;
                                                                                  in a model without a gate: up
    transformer.layers.{l}.mlp.gate.weight                                        up
    transformer.ln_f.weight, lm_head.weight                                       last stage; a tied head is stored again

Layers count from 0 in each pipeline stage.
"""

from collections.abc import Mapping
from dataclasses import replace

from megaconv.errors import NotExpressible
from megaconv.families import Family, family
from megaconv.model.config import ModelConfig
from megaconv.model.table import Copied, Fused, OtherAxis, Row, Spelling

HEAD = "lm_head.weight"
SUPPORTED = ("llama", "gpt2")
"""Families that are compared with ModelOpt's own output."""

_L = "transformer.layers.{l}."
_NAMES: Mapping[str, Spelling] = {
    "embed.weight": "transformer.vocab_embedding.weight",
    "positions.weight": OtherAxis("transformer.position_embedding.weight", tp=0),
    "layers.{l}.input_norm.weight": _L + "input_layernorm.weight",
    "layers.{l}.input_norm.{weight|bias}": _L + "input_layernorm.{weight|bias}",
    "layers.{l}.attn.{q|k|v}.weight": Fused(_L + "attention.qkv.weight"),
    "layers.{l}.attn.{q|k|v}.bias": Fused(_L + "attention.qkv.bias"),
    "layers.{l}.attn.o.weight": _L + "attention.dense.weight",
    "layers.{l}.attn.o.bias": _L + "attention.dense.bias",
    "layers.{l}.mlp_norm.weight": _L + "post_layernorm.weight",
    "layers.{l}.mlp_norm.{weight|bias}": _L + "post_layernorm.{weight|bias}",
    "layers.{l}.mlp.{gate|up}.weight": _L + "mlp.{fc|gate}.weight",
    "layers.{l}.mlp.{gate|up}.bias": _L + "mlp.{fc|gate}.bias",
    "layers.{l}.mlp.up.weight": _L + "mlp.fc.weight",
    "layers.{l}.mlp.up.bias": _L + "mlp.fc.bias",
    "layers.{l}.mlp.down.weight": _L + "mlp.proj.weight",
    "layers.{l}.mlp.down.bias": _L + "mlp.proj.bias",
    "final_norm.weight": "transformer.ln_f.weight",
    "final_norm.{weight|bias}": "transformer.ln_f.{weight|bias}",
    "head.weight": HEAD,
}
_WHOLE = {
    "embed.weight": "transformer.vocab_embedding.weight",
    "positions.weight": "transformer.position_embedding.weight",
}


def supported_family(config: ModelConfig) -> Family:
    """The family of a model. Raises NotExpressible for a family without these names."""
    if config.family not in SUPPORTED:
        raise NotExpressible(
            f"--saver trtllm: {config.family} is not supported; supported are {' and '.join(SUPPORTED)}. "
            "TensorRT-LLM also loads --saver hf with --quantize"
        )
    return family(config.family)


def trtllm_rows(of: Family) -> tuple[Row, ...]:
    """A family's table with TensorRT-LLM's names. Rows without such a name stay unchanged."""
    return tuple(
        _with_tied_head(row).renamed(trtllm=_NAMES[row.canonical])
        if row.canonical in _NAMES
        else row
        for row in of.rows
    )


def with_whole_embedding(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """The table of files in which each rank of the first stage holds the whole embedding."""
    return tuple(
        replace(row, tp=None).renamed(trtllm=_WHOLE[row.canonical])
        if row.canonical in _WHOLE
        else row
        for row in rows
    )


def _with_tied_head(row: Row) -> Row:
    """The row with a second copy for the head, which TensorRT-LLM's files always hold."""
    copies = tuple(_with_head_name(copied) for copied in row.copies)
    return replace(row, copies=copies)


def _with_head_name(copied: Copied) -> Copied:
    if copied.place != "head":
        return copied
    names = {**copied.names, "trtllm": (HEAD,)}
    return replace(copied, names=names, untied=(*copied.untied, "trtllm"))

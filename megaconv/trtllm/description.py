"""Reads TensorRT-LLM's config.json: the model, its layout, and the form of its weights.

Every key is read, listed as harmless, or refused unless it has its only supported value. Files of nvidia-modelopt 0.47
and of TensorRT-LLM's own converters have such keys. Source: PretrainedConfig, LLaMAConfig, GPTConfig and Mapping of
TensorRT-LLM.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaconv.errors import CorruptCheckpoint, UnsupportedInput
from megaconv.families import Family, family_of_hf
from megaconv.families.parts.hf_config import load_config, naming_file
from megaconv.model.ceilings import RANKS, require_countable
from megaconv.model.check import well_formed
from megaconv.model.config import ModelConfig
from megaconv.model.layout import Layout
from megaconv.trtllm.config import CLASSES, as_hf

_Raw = Mapping[str, Any]

_READ = (
    "architecture", "dtype", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size",
    "norm_epsilon", "vocab_size", "max_position_embeddings", "hidden_act", "use_parallel_embedding", "head_size",
    "intermediate_size", "position_embedding_type", "rotary_base", "rotary_scaling", "attn_bias", "mlp_bias", "mapping",
    "quantization",
)  # fmt: skip
_HARMLESS = (
    "producer", "version", "logits_dtype", "rank", "runtime_defaults", "disable_weight_only_quant_plugin",
    "kv_dtype",  # older releases: the dtype of the cache
    "tie_word_embeddings",  # the tensors show it
    "moe_normalization_mode", "moe_top_k", "moe_tp_mode",  # keys of experts
)  # fmt: skip
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "embedding_sharding_dim": (0,),
    "share_embedding_table": (False,),
    "residual_mlp": (False,),
    "rotary_pct": (1.0,),
    "lm_head_bias": (False,),
    "qk_layernorm": (False,),
    "moe_num_experts": (0,),
    "remove_duplicated_kv_heads": (False,),
    "fc_after_embed": (False,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "layer_idx_offset": (0,),
    "embedding_multiplier": (1.0,),
    "attention_multiplier": (1.0,),
    "residual_multiplier": (1.0,),
    "output_multiplier_scale": (1.0,),
    "q_scaling": (1.0,),
    "embedding_scale": (None,),
    "apply_query_key_layer_scaling": (False,),
}
"""Key -> its only supported values."""
_OF_LLAMA: Mapping[str, tuple[Any, ...]] = {
    "decoder": ("llama",),
    "rmsnorm": (True,),
    "position_embedding_type": ("rope_gpt_neox",),
}
_OF_GPT2: Mapping[str, tuple[Any, ...]] = {
    "decoder": ("gpt",),
    "rmsnorm": (False,),
    "bias": (True,),
    "rotary_base": (10000.0,),
    "rotary_scaling": (None,),
    # ModelOpt names rope here if TensorRT-LLM isn't beside it.
    "position_embedding_type": ("learned_absolute", "rope_gpt_neox"),
}
_MAPPING_HARMLESS = (
    "gpus_per_node",
    "rank",
    "tp_rank",
    "pp_rank",
    "moe_tp_size",
    "moe_ep_size",
    "moe_cluster_size",
    "attn_tp_size",  # tp_size * cp_size / attn_cp_size
)
_MAPPING_ONLY: Mapping[str, tuple[Any, ...]] = {
    "cp_size": (1,),
    "cp_config": (None, {}),
    "attn_cp_size": (1, -1),
    "auto_parallel": (False,),
    "enable_attention_dp": (False,),
    "enable_lm_head_tp_in_adp": (False,),
}
_ALGORITHMS = (None, "FP8")
_CACHES = (None, "FP8", "INT8")


@dataclass(frozen=True)
class Description:
    """A checkpoint as its config.json describes it. The head counts as untied; the tensors show whether it is."""

    family: Family
    config: ModelConfig
    layout: Layout
    shards_embedding: bool
    """False if every tensor-parallel rank of the first stage holds the whole embedding."""
    is_fp8: bool

    @property
    def ranks(self) -> int:
        return self.layout.tp * self.layout.pp


def read_description(path: Path) -> Description:
    """The content of a config.json.

    Raises CorruptCheckpoint for impossible values, UnsupportedInput for settings that aren't supported, UnknownFamily.
    """
    where = str(path)
    raw = load_config(path)
    require_countable(raw, where)
    with naming_file(path), well_formed(where):
        family_name = _family_name(raw, where)
        _require_known(raw, family_name, where)
        complete = _with_defaults(raw)
        described = as_hf(complete, family_name) | {"tie_word_embeddings": False}
        found = family_of_hf(described, where)
        config = found.read_hf(described)
        _require_heads(config, complete, where)
        return Description(
            family=found,
            config=config,
            layout=_layout(raw.get("mapping") or {}, config.layer_count, where),
            shards_embedding=raw.get("use_parallel_embedding", False),
            is_fp8=_is_fp8(raw.get("quantization") or {}, where),
        )


def _family_name(raw: _Raw, where: str) -> str:
    architecture = raw.get("architecture")
    for name, (known, _) in CLASSES.items():
        if architecture == known:
            return name
    known = " and ".join(each for each, _ in CLASSES.values())
    raise UnsupportedInput(
        f"{where}: architecture {architecture!r:.60} of TensorRT-LLM is not supported; supported are {known}. "
        "Give the checkpoint that it was made from"
    )


def _require_heads(config: ModelConfig, complete: _Raw, where: str) -> None:
    """Raise UnsupportedInput for sizes of heads that a model of the family can't have."""
    attention = config.attention
    read = {
        "num_key_value_heads": attention.kv_heads,
        "head_size": attention.head_dim,
    }
    for key, expected in read.items():
        if complete[key] != expected:
            raise UnsupportedInput(
                f"{where}: {key} = {complete[key]!r:.40}; a {config.family} of this size has {expected}"
            )


def _require_known(raw: _Raw, family_name: str, where: str) -> None:
    of_family = _OF_GPT2 if family_name == "gpt2" else _OF_LLAMA
    head_size = _with_defaults(raw)["head_size"]
    only = {**_ONLY, **of_family, "rotary_embedding_dim": (None, head_size)}
    if family_name != "gpt2":  # the bias of attention's last matrix: as those of q, k, v
        only["bias"] = (bool(raw.get("attn_bias", raw.get("bias", False))),)
    _require(raw, (*_READ, *_HARMLESS, "moe"), only, where)
    experts = (raw.get("moe") or {}).get("num_experts", 0)
    if experts:
        raise UnsupportedInput(
            f"{where}: moe.num_experts = {experts!r:.40}; experts are not supported"
        )


def _require(
    raw: _Raw, known: tuple[str, ...], only: Mapping[str, tuple[Any, ...]], where: str
) -> None:
    """Raise UnsupportedInput for a key that is unknown, or has another than its only supported values."""
    for key, value in raw.items():
        if key in only:
            if value not in only[key]:
                expected = " or ".join(map(repr, only[key]))
                raise UnsupportedInput(
                    f"{where}: {key} = {value!r:.60} is not supported; supported is {expected}. "
                    "Give the checkpoint that it was made from"
                )
        elif key not in known:
            raise UnsupportedInput(
                f"{where}: has the key {key!r:.60} = {value!r:.60}, whose meaning is not known; "
                "give the checkpoint that it was made from"
            )


def _with_defaults(raw: _Raw) -> dict[str, Any]:
    """The file with TensorRT-LLM's values for missing keys."""
    heads = raw["num_attention_heads"]
    defaults = {
        "num_key_value_heads": heads,
        "norm_epsilon": 1e-5,
        "head_size": raw["hidden_size"] // heads,
        "intermediate_size": 4 * raw["hidden_size"],
        "max_position_embeddings": None,
        "attn_bias": raw.get("bias", False),
    }
    return {**defaults, **raw}


def _layout(mapping: _Raw, layers: int, where: str) -> Layout:
    _require(
        mapping,
        ("world_size", "tp_size", "pp_size", *_MAPPING_HARMLESS),
        _MAPPING_ONLY,
        f"{where}: mapping",
    )
    tp, pp = (mapping.get(key, 1) for key in ("tp_size", "pp_size"))
    world = mapping.get("world_size", tp * pp)
    sizes = {"tp_size": tp, "pp_size": pp, "world_size": world}
    for name, size in sizes.items():
        if type(size) is not int or not 1 <= size <= RANKS:
            raise CorruptCheckpoint(
                f"{where}: mapping.{name} should be 1 to {RANKS:,}, found {size!r:.40}"
            )
    if tp * pp != world:
        raise CorruptCheckpoint(
            f"{where}: mapping.world_size is {world}, but tp_size * pp_size is {tp * pp}"
        )
    if pp > layers:
        raise CorruptCheckpoint(
            f"{where}: mapping.pp_size is {pp}, but the model has {layers} layers"
        )
    return Layout(tp=tp, pp=pp, stage_layers=_stages(layers, pp))


def _stages(layers: int, pp: int) -> tuple[int, ...]:
    """The number of layers of each stage. The first stages have one more if pp doesn't divide them."""
    each, remaining = divmod(layers, pp)
    return tuple(each + (stage < remaining) for stage in range(pp))


def _is_fp8(quantization: _Raw, where: str) -> bool:
    algorithm = quantization.get("quant_algo")
    if algorithm not in _ALGORITHMS:
        raise UnsupportedInput(
            f"{where}: weights quantized as {algorithm!r:.40}; plain weights and FP8 are supported. "
            "Give the checkpoint that it was made from"
        )
    cache = quantization.get("kv_cache_quant_algo")
    if cache not in _CACHES:
        raise UnsupportedInput(f"{where}: kv_cache_quant_algo {cache!r:.40} is not known")
    return algorithm is not None

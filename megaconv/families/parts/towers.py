"""Vision encoders that Megatron-Bridge builds of Megatron's own layers: those of Qwen3-VL, Qwen 3.5 and EXAONE 4.5.

    model.visual.blocks.{l}.attn.qkv.weight    vision_model.decoder.layers.{l}.self_attention.linear_qkv.weight

Tensor parallelism shards these encoders like a language model's layers. A whole encoder is on the first pipeline stage.
Source: mapping_registry() of qwen3_vl_bridge.py, qwen35_vl_bridge.py and exaone45_bridge.py, and the vision models that
they build, Megatron-Bridge at 067f987df03b.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megaconv.errors import CorruptCheckpoint
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.model.beside import BESIDE, TOWER
from megaconv.model.ceilings import LAYERS, WIDTH
from megaconv.model.table import Fused, Row, expand

VISION = "vision_config"
IN_FILES = "model.visual."
"""Prefix of the encoder's names in transformers' files."""

_HF, _CORE = BESIDE + IN_FILES, BESIDE + TOWER
_HF_LAYER, _LAYER = _HF + "blocks.{l}.", _CORE + "decoder.layers.{l}."
_HIDDEN, _MERGED = "tower_hidden", "tower_hidden*tower_merge"
_QKV = ("tower_heads*tower_head_dim", *("tower_kv_heads*tower_head_dim",) * 2)


def _matrices(*axes: str) -> tuple[str, ...]:
    return tuple(f"{axis} {_HIDDEN}" for axis in axes)


def _first(name: str, hf: str, shape: str, tp: int | None = None) -> Row:
    """The row of a tensor that occurs once in an encoder."""
    return Row(_CORE + name, (shape,), tp=tp, stage="first", hf=_HF + hf, core=_CORE + name)


def _norms(words: str) -> tuple[Row, ...]:
    """The rows of the norms before a layer's attention and MLP. words: `weight`, or `{weight|bias}` for a LayerNorm."""
    shapes = (_HIDDEN,) * len(expand(words))
    return tuple(
        Row(
            f"{_LAYER}{local}.{words}",
            shapes,
            stage="tower",
            hf=f"{_HF_LAYER}{norm}.{words}",
            core=f"{_LAYER}{fused}_{words}",
            core_local=f"{_LAYER}{local}.{words}",
        )
        for norm, fused, local in (
            ("norm1", "self_attention.linear_qkv.layer_norm", "input_layernorm"),
            ("norm2", "mlp.linear_fc1.layer_norm", "pre_mlp_layernorm"),
        )
    )


def _attention() -> tuple[Row, ...]:
    """The rows of attention. Files store q, k and v as one tensor [q; k; v]; Megatron groups their rows by heads."""
    return (
        *(
            Row(f"{_LAYER}self_attention.{{q|k|v}}.{word}", shapes, tp=0, stage="tower",
                hf=Fused(f"{_HF_LAYER}attn.qkv.{word}"),
                core=Fused(f"{_LAYER}self_attention.linear_qkv.{word}", groups="tower_kv_heads"))
            for word, shapes in (("weight", _matrices(*_QKV)), ("bias", _QKV))
        ),
        Row(_LAYER + "self_attention.linear_proj.weight", ("tower_hidden tower_heads*tower_head_dim",), tp=1, stage="tower",
            hf=_HF_LAYER + "attn.proj.weight", core=_LAYER + "self_attention.linear_proj.weight"),
        Row(_LAYER + "self_attention.linear_proj.bias", (_HIDDEN,), stage="tower",
            hf=_HF_LAYER + "attn.proj.bias", core=_LAYER + "self_attention.linear_proj.bias"),
    )  # fmt: skip


def _down(hf: str) -> tuple[Row, ...]:
    """The rows of an MLP's second matrix."""
    return (
        Row(_LAYER + "mlp.linear_fc2.weight", ("tower_hidden tower_ffn",), tp=1, stage="tower",
            hf=f"{_HF_LAYER}mlp.{hf}.weight", core=_LAYER + "mlp.linear_fc2.weight"),
        Row(_LAYER + "mlp.linear_fc2.bias", (_HIDDEN,), stage="tower",
            hf=f"{_HF_LAYER}mlp.{hf}.bias", core=_LAYER + "mlp.linear_fc2.bias"),
    )  # fmt: skip


_PLAIN_MLP = (
    Row(_LAYER + "mlp.linear_fc1.weight", _matrices("tower_ffn"), tp=0, stage="tower",
        hf=_HF_LAYER + "mlp.linear_fc1.weight", core=_LAYER + "mlp.linear_fc1.weight"),
    Row(_LAYER + "mlp.linear_fc1.bias", ("tower_ffn",), tp=0, stage="tower",
        hf=_HF_LAYER + "mlp.linear_fc1.bias", core=_LAYER + "mlp.linear_fc1.bias"),
    *_down("linear_fc2"),
)  # fmt: skip
_GATED_MLP = (
    *(
        Row(f"{_LAYER}mlp.{{gate|up}}.{word}", shapes, tp=0, stage="tower",
            hf=f"{_HF_LAYER}mlp.{{gate|up}}_proj.{word}", core=Fused(f"{_LAYER}mlp.linear_fc1.{word}"))
        for word, shapes in (("weight", _matrices("tower_ffn", "tower_ffn")), ("bias", ("tower_ffn", "tower_ffn")))
    ),
    *_down("down_proj"),
)  # fmt: skip


def _merger(name: str, hf: str, fc1: str, fc2: str, stage: str) -> tuple[Row, ...]:
    """The rows of a merger, which joins several tokens to one. Its layers are column and row parallel.

    name, hf: prefixes of its names. fc1, fc2: transformers' names of its layers.
    """
    return tuple(
        Row(f"{name}{ours}", (shape,), tp=tp, stage=stage, hf=f"{hf}{theirs}", core=f"{name}{ours}")
        for ours, theirs, shape, tp in (
            ("linear_fc1.weight", f"{fc1}.weight", f"{_MERGED} {_MERGED}", 0),
            ("linear_fc1.bias", f"{fc1}.bias", _MERGED, 0),
            ("linear_fc2.weight", f"{fc2}.weight", f"tower_out {_MERGED}", 1),
            ("linear_fc2.bias", f"{fc2}.bias", "tower_out", None),
        )
    )


def _merger_norm(name: str, hf: str, width: str, stage: str) -> Row:
    return Row(
        f"{name}.{{weight|bias}}",
        (width, width),
        stage=stage,
        hf=f"{hf}.{{weight|bias}}",
        core=f"{name}.{{weight|bias}}",
    )


_PATCH = "tower_hidden tower_channels tower_frames tower_patch tower_patch"
_DEEPSTACK = _CORE + "decoder.deepstack_merger_list.{l}."
_HF_DEEPSTACK = _HF + "deepstack_merger_list.{l}."
QWEN3 = (
    _first("patch_embed.proj.weight", "patch_embed.proj.weight", _PATCH),
    _first("patch_embed.proj.bias", "patch_embed.proj.bias", _HIDDEN),
    _first("pos_embed.weight", "pos_embed.weight", f"tower_positions {_HIDDEN}"),
    *_norms("{weight|bias}"), *_attention(), *_PLAIN_MLP,
    _merger_norm(_DEEPSTACK + "patch_norm", _HF_DEEPSTACK + "norm", _MERGED, "deepstack"),
    *_merger(_DEEPSTACK, _HF_DEEPSTACK, "linear_fc1", "linear_fc2", "deepstack"),
    _merger_norm(_CORE + "merger.patch_norm", _HF + "merger.norm", _HIDDEN, "first"),
    *_merger(_CORE + "merger.", _HF + "merger.", "linear_fc1", "linear_fc2", "first"),
)  # fmt: skip
EXAONE = (
    _first("patch_embed.proj.weight", "patch_embed.proj.weight", _PATCH),
    *_norms("weight"), *_attention(), *_GATED_MLP,
    _first("merger.patch_norm.weight", "merger.ln_q.weight", _HIDDEN),
    *_merger(_CORE + "merger.", _HF + "merger.", "mlp.0", "mlp.2", "first"),
)  # fmt: skip

_QWEN3_SIZES = {
    "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "in_channels": 3, "patch_size": 16,
    "temporal_patch_size": 2, "spatial_merge_size": 2, "out_hidden_size": 3584, "num_position_embeddings": 2304,
}  # fmt: skip
_QWEN3_VL = _QWEN3_SIZES | {"deepstack_visual_indexes": (8, 16, 24)}
_EXAONE = {
    "depth": 32, "hidden_size": 3584, "intermediate_size": 3420, "num_heads": 16, "num_key_value_heads": 8, "in_channels": 3,
    "patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2, "out_hidden_size": 3584,
}  # fmt: skip


@dataclass(frozen=True)
class Tower:
    """A kind of vision encoder."""

    rows: tuple[Row, ...]
    defaults: Mapping[str, Any]
    """transformers' own defaults for keys that a vision_config leaves out."""

    def sizes(self, config: Mapping[str, Any]) -> dict[str, int]:
        """The sizes that the shapes of the rows are written in. Raises CorruptCheckpoint.

        config: the config.json of the whole model.
        """
        stated = config.get(VISION)
        if not isinstance(stated, Mapping):
            raise CorruptCheckpoint(
                f"{CONFIG_NAME}: {VISION} should be an object, found {stated!r:.60}"
            )
        found = {
            **self.defaults,
            **{key: value for key, value in stated.items() if key in self.defaults},
        }
        deepstack = found.pop("deepstack_visual_indexes", ())
        if not isinstance(deepstack, (list, tuple)) or len(deepstack) > LAYERS:
            raise CorruptCheckpoint(
                f"{CONFIG_NAME}: {VISION}.deepstack_visual_indexes should list layers, found {deepstack!r:.60}"
            )
        for key, value in found.items():
            if type(value) is not int or not 1 <= value <= (LAYERS if key == "depth" else WIDTH):
                raise CorruptCheckpoint(
                    f"{CONFIG_NAME}: {VISION}.{key} should be a positive number, found {value!r:.60}"
                )
        heads, hidden = found["num_heads"], found["hidden_size"]
        if hidden % heads or heads % found.get("num_key_value_heads", heads):
            raise CorruptCheckpoint(
                f"{CONFIG_NAME}: {VISION} can't have {heads} heads in a width of {hidden}"
            )
        return {
            "tower_layers": found["depth"],
            "tower_deepstack": len(deepstack),
            "tower_hidden": hidden,
            "tower_heads": heads,
            "tower_kv_heads": found.get("num_key_value_heads", heads),
            "tower_head_dim": hidden // heads,
            "tower_ffn": found["intermediate_size"],
            "tower_merge": found["spatial_merge_size"] ** 2,
            "tower_out": found["out_hidden_size"],
            "tower_channels": found["in_channels"],
            "tower_frames": found["temporal_patch_size"],
            "tower_patch": found["patch_size"],
            "tower_positions": found.get("num_position_embeddings", 0),
        }


TOWERS: Mapping[str, Tower] = MappingProxyType(
    {
        "qwen3_vl": Tower(QWEN3, _QWEN3_VL),
        "qwen3_vl_moe": Tower(QWEN3, _QWEN3_VL),
        "qwen3_5": Tower(QWEN3, _QWEN3_SIZES),
        "qwen3_5_moe": Tower(QWEN3, _QWEN3_SIZES),
        "exaone4_5": Tower(EXAONE, _EXAONE),
    }
)
"""model_type -> its vision encoder."""

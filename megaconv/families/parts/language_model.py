"""The language model inside a multimodal model: its part of config.json, and the names of its tensors.

    {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {"model_type": "gemma3_text", ...}, "vision_config": ...}

transformers chooses the class of the language model by the model_type of text_config, so this key also gives the
family. The tensor names are those of the family's own models with a prefix.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from megaconv.errors import CorruptCheckpoint
from megaconv.families.parts.hf_config import QUANTIZATION
from megaconv.families.parts.keys import CONFIG_NAME
from megaconv.model.naming import HF
from megaconv.model.table import Row

TEXT = "text_config"
THINKER = "thinker_config"
"""The part of a model that also speaks (Qwen-Omni) which understands: it has the text_config."""

OF_THINKER = ("", "thinker.")
INSIDE = (
    ("", ""),
    ("", "language_model."),
    ("model.", "model.language_model."),
    ("model.", "model.text_model."),
    ("model.", "model.transformer."),
    ("model.", "model.llm."),
    OF_THINKER,
)
"""(prefix of a name, the same prefix inside a multimodal model)."""

SAME_AS = {
    "qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2",
    "qwen2_5_omni_text": "qwen2", "qwen3_omni_moe_text": "qwen3_moe", "qwen3_asr_text": "qwen3",
    "qwen3_vl_text": "qwen3", "qwen3_vl_moe_text": "qwen3_moe", "glm4v_text": "glm4", "glm4v_moe_text": "glm4_moe",
    "glm_ocr_text": "glm4", "paddleocr_vl_text": "llama", "paddleocr_vl": "llama", "granite_docling_text": "granite",
    "granite4_vision_text": "granite",
    "hunyuan_vl_text": "hunyuan_v1_dense", "phi4_multimodal": "phi3",
}  # fmt: skip
"""model_type of a language model with its own type -> model_type of the equal text model. They are equal only for
text: then all three positions that images give a token (mrope) are the same."""

_QWEN2_VL = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
_PADDLE_OCR = {
    "vocab_size": 103424,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rope_theta": 5e5,
    "rms_norm_eps": 1e-5,
}
_GEMMA_4 = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
}
_MHA_32 = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "apertus1p5_text": {**_MHA_32, "vocab_size": 266752},
    "llama": {**_MHA_32, "vocab_size": 32000, "intermediate_size": 11008},
    "mistral": {**_MHA_32, "vocab_size": 32000, "intermediate_size": 14336},
    "qwen2": {**_MHA_32, "vocab_size": 151936, "intermediate_size": 22016},
    "qwen3": {**_MHA_32, "vocab_size": 151936, "intermediate_size": 22016},
    "gemma3_text": {
        "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    },
    "qwen2_5_omni_text": {
        "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "rope_theta": 1e6,
    },
    "qwen3_omni_moe_text": {
        "vocab_size": 3584, "hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "moe_intermediate_size": 768, "norm_topk_prob": True, "rope_theta": 1e6,
    },
    "gemma3n_text": {"vocab_size": 262400, "hidden_size": 2048, "num_hidden_layers": 35, "num_attention_heads": 8},
    "gemma4_text": _GEMMA_4,
    "gemma4_unified_text": _GEMMA_4,
    "minimax_m3_vl_text": {"vocab_size": 200064, "hidden_size": 6144, "num_hidden_layers": 60, "num_attention_heads": 64},
    "ernie4_5_vl_moe_text": {"vocab_size": 103424, "hidden_size": 2560, "num_hidden_layers": 28, "num_attention_heads": 20},
    "glm5_next_text": {"vocab_size": 154880, "hidden_size": 4096, "num_hidden_layers": 45, "num_attention_heads": 64},
    "mistral_large4_text": {"vocab_size": 204800, "hidden_size": 6144, "num_hidden_layers": 72, "num_attention_heads": 64},
    "hy_v4_vl_text": {"vocab_size": 120832, "hidden_size": 6144, "num_hidden_layers": 78, "num_attention_heads": 64},
    "muse_glimmer_text": {"vocab_size": 202048, "hidden_size": 6656, "num_hidden_layers": 52, "num_attention_heads": 32},
    "muse_spark_text": {"vocab_size": 202048, "hidden_size": 8192, "num_hidden_layers": 62, "num_attention_heads": 128},
    "qwen4_exp_text": {"vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16},
    "inkling_text": {"vocab_size": 201024, "hidden_size": 6144, "num_hidden_layers": 66, "num_attention_heads": 64},
    "molmo2_text": {"vocab_size": 151936, "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32},
    "mllama_text_model": {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 40, "num_attention_heads": 32,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_theta": 5e5,
        "bos_token_id": 128000, "eos_token_id": 128001, "pad_token_id": 128004,
    },
    "phi4_multimodal": {
        "vocab_size": 200064, "intermediate_size": 8192, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "bos_token_id": 199999,
        "eos_token_id": [199999, 200020], "pad_token_id": 199999,
    },
    "step3p5": {"vocab_size": 128815, "hidden_size": 4096, "num_hidden_layers": 45, "num_attention_heads": 64},
    "glm4v_text": {"partial_rotary_factor": 1.0},
    "glm_ocr_text": {
        "vocab_size": 59392, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16, "num_attention_heads": 16,
        "num_key_value_heads": 8, "partial_rotary_factor": 1.0,
    },
    "paddleocr_vl": _PADDLE_OCR,
    "paddleocr_vl_text": _PADDLE_OCR,
    "glm4v_moe_text": {"attention_bias": True},
    "qwen2_vl_text": {**_QWEN2_VL, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    "qwen2_5_vl_text": {**_QWEN2_VL, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
}  # fmt: skip
"""model_type -> keys that its text_config may leave out. transformers 4 left out a value that equals the default of its
class."""

_ALWAYS: Mapping[str, Mapping[str, Any]] = {
    "qwen3_vl_moe_text": {"norm_topk_prob": True},
    "glm_ocr_text": {"attention_bias": False},
}
"""model_type -> values that the model always uses, whatever its text_config says."""

_OF_IMAGES = re.compile("(image|video|vision|audio)_")
_MROPE = ("mrope_section", "mrope_interleaved")
_WITH_SECTIONS = ("ernie4_5_vl_moe_text", "ernie4_5_moe_vl", "hy_v4_vl_text")
"""model_type of language models whose own classes read mrope_section. All others are plain text models by themselves."""
OUTSIDE = (
    *("model.vision_model.", "model.vision_tower.", "model.resampler_model."),
    "model.embed_tokens_extend.",
)
"""Prefixes of the names of encoders and projectors. Some models hold them beside a language model whose own names have no
prefix but `model.` (ERNIE 4.5 VL, Phi-4 multimodal)."""
_FROM_OUTSIDE = (
    "torch_dtype",
    "dtype",
    QUANTIZATION,
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
"""Keys that a config.json may have for all of its parts together."""


def inner_config(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """The config.json of the language model inside, with the `model_type` of the standalone model; None if there is no
    language model inside.

    Raises CorruptCheckpoint for a text_config that is not an object.
    """
    inside = _stated(raw)
    if inside is None:
        return None
    kind = str(inside.get("model_type"))
    holder = _understanding(raw)
    around = {**raw, **holder}
    outside = {
        key: around[key] for key in _FROM_OUTSIDE if key in around and inside.get(key) is None
    }
    found = {**DEFAULTS.get(kind, {}), **inside, **outside, **_ALWAYS.get(kind, {})}
    inner_tie = inside.get("tie_word_embeddings", False)
    found["tie_word_embeddings"] = holder.get("tie_word_embeddings", inner_tie)
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(found.get(key), Mapping) and kind not in _WITH_SECTIONS:
            found[key] = _of_text(found[key])
    found["model_type"] = SAME_AS.get(kind, kind)
    return found


def _understanding(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the model that understands: all of it, unless the model also speaks."""
    thinker = raw.get(THINKER)
    return thinker if isinstance(thinker, Mapping) else raw


def _stated(raw: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The part of a config.json that describes the language model inside; None if there is none."""
    inside = _understanding(raw).get(TEXT)
    if inside is None and "vision_config" in raw and "hidden_size" in raw:
        # Qwen2-VL on the Hub and Phi-4 multimodal have the keys of their language model beside the others.
        return {key: value for key, value in raw.items() if not _OF_IMAGES.match(key)}
    if inside is not None and not isinstance(inside, Mapping):
        raise CorruptCheckpoint(f"{CONFIG_NAME}: {TEXT} should be an object, found {inside!r}")
    return inside


def _of_text(rope: Mapping[str, Any]) -> dict[str, Any] | None:
    """A rope object without its settings for images."""
    kept = {key: value for key, value in rope.items() if key not in _MROPE}
    for key in ("type", "rope_type"):
        if kept.get(key) == "mrope":
            kept[key] = "default"
    return (
        None if set(kept) <= {"type", "rope_type"} and set(kept.values()) <= {"default"} else kept
    )


def place_inside(names: Collection[str]) -> tuple[str, str]:
    """(prefix of tensor names in the standalone language model, the same prefix in these names)."""
    return next(
        (place for place in INSIDE[1:] if any(name.startswith(place[1]) for name in names)),
        ("model.", "model."),
    )


def inner_names(names: Collection[str], rows: tuple[Row, ...]) -> dict[str, str]:
    """Name of each of the language model's tensors -> its name in the standalone model. All other tensors are outside
    the language model.

    rows: the language model's table. Tensors whose names there don't begin with `model.` (a head, MTP layers) keep
    their names.
    """
    begin, longer = place_inside(names)
    found = {
        name: begin + name[len(longer) :]
        for name in names
        if name.startswith(longer) and not name.startswith(OUTSIDE)
    }
    first_words = {f"{name.partition('.')[0]}." for name in names_in_files(rows)}
    if longer == OF_THINKER[1]:  # the encoders of a thinker are in it too
        return {old: new for old, new in found.items() if new.startswith(tuple(first_words))}
    words = tuple(first_words - {"model."})
    return found | {name: name for name in names if name.startswith(words)}


def names_in_files(rows: Iterable[Row]) -> Iterator[str]:
    """Yield the patterns of all names in Hugging Face's files."""
    for row in rows:
        for key, spelled in row.names.items():
            if key.startswith(HF.scheme):
                yield from (spelling.name for spelling in spelled)


def heads_for_words(rows: Iterable[Row]) -> set[str]:
    """The names in Hugging Face's files of a head for words, in any form."""
    return set(names_in_files(row for row in rows if row.canonical == "head.weight"))


def put_inside(name: str, begin: str, inside: str) -> str:
    """The reverse of inner_names for one name. begin, inside: one pair of INSIDE."""
    return inside + name[len(begin) :] if name.startswith(begin) else name

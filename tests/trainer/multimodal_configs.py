"""The configurations of small multimodal models, by kind."""

from collections.abc import Callable, Mapping
from typing import Any

from tests.trainer.special_tokens import BORDERS, START, token

TEXT: Mapping[str, Any] = {
    "vocab_size": 304, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "tie_word_embeddings": False,
    "bos_token_id": 256, "eos_token_id": 258, "pad_token_id": 256,
}  # fmt: skip
GRID: Mapping[str, Any] = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}


def _qwen2_vl(transformers: Any) -> tuple[Any, Any]:
    vision = {
        **GRID,
        "depth": 2,
        "embed_dim": 16,
        "hidden_size": 32,
        "num_heads": 2,
        "mlp_ratio": 2,
    }
    return transformers.Qwen2VLConfig, {
        "text_config": _rotating([2, 1, 1]),
        "vision_config": vision,
    }


def _qwen2_5_vl(transformers: Any) -> tuple[Any, Any]:
    vision = {
        **GRID, "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32, "window_size": 16,
        "fullatt_block_indexes": [1],
    }  # fmt: skip
    return transformers.Qwen2_5_VLConfig, {
        "text_config": _rotating([1, 1, 2]),
        "vision_config": vision,
    }


_VISION_3 = {
    **GRID, "depth": 3, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32,
    "num_position_embeddings": 64,
}  # fmt: skip


def _qwen3_vl(transformers: Any) -> tuple[Any, Any]:
    vision = {**_VISION_3, "deepstack_visual_indexes": [0, 1]}
    return transformers.Qwen3VLConfig, {
        "text_config": _rotating([2, 1, 1]),
        "vision_config": vision,
    }


def _qwen3_vl_moe(transformers: Any) -> tuple[Any, Any]:
    vision = {**_VISION_3, "deepstack_visual_indexes": [0, 1]}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    text = {**_rotating([2, 1, 1]), **experts}
    return transformers.Qwen3VLMoeConfig, {"text_config": text, "vision_config": vision}


def _qwen3_5(transformers: Any) -> tuple[Any, Any]:
    linear = {
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "full_attention"] * 2, "head_dim": 16,
    }  # fmt: skip
    rope = {"mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25}
    text = {**_rotating([1, 1, 0]), **linear}
    text["rope_parameters"] |= rope
    return transformers.Qwen3_5Config, {"text_config": text, "vision_config": _VISION_3}


def _qwen3_5_moe(transformers: Any) -> tuple[Any, Any]:
    _, fields = _qwen3_5(transformers)
    experts = {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
    }  # fmt: skip
    text = {**fields["text_config"], **experts}
    return transformers.Qwen3_5MoeConfig, {**fields, "text_config": text}


def _glm4v(transformers: Any) -> tuple[Any, Any]:
    vision = {
        **GRID, "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32, "image_size": 64,
    }  # fmt: skip
    text = _rotating([1, 0, 1])
    text["rope_parameters"] |= {"partial_rotary_factor": 0.5}
    return transformers.Glm4vConfig, {"text_config": text, "vision_config": vision}


def _glm4v_moe(transformers: Any) -> tuple[Any, Any]:
    vision = {
        **GRID, "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32, "image_size": 64,
    }  # fmt: skip
    experts = {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "n_group": 1, "topk_group": 1,
    }  # fmt: skip
    text = {**_rotating([1, 0, 1]), **experts}
    text["rope_parameters"] |= {"partial_rotary_factor": 0.5}
    return transformers.Glm4vMoeConfig, {"text_config": text, "vision_config": vision}


def _glm_ocr(transformers: Any) -> tuple[Any, Any]:
    vision = {
        **GRID, "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32, "image_size": 64,
    }  # fmt: skip
    text = _rotating([1, 2, 1])
    return transformers.GlmOcrConfig, {"text_config": text, "vision_config": vision}


def _paddleocr_vl(transformers: Any) -> tuple[Any, Any]:
    vision = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 64, "patch_size": 4,
        "spatial_merge_size": 2,
    }  # fmt: skip
    return transformers.PaddleOCRVLConfig, {
        "text_config": _rotating([2, 1, 1]),
        "vision_config": vision,
    }


def _exaone4_5(transformers: Any) -> tuple[Any, Any]:
    vision = {
        **GRID, "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "num_key_value_heads": 1, "out_hidden_size": 32,
        "window_size": 16, "fullatt_block_indexes": [1],
    }  # fmt: skip
    windows = {"sliding_window": 9, "sliding_window_pattern": 2}
    text = {**TEXT, **windows, "model_type": "exaone4"}
    return transformers.Exaone4_5_Config, {"text_config": text, "vision_config": vision}


def _llava(transformers: Any) -> tuple[Any, Any]:
    vision = {
        "model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
        "num_attention_heads": 2, "image_size": 16, "patch_size": 4, "projection_dim": 16,
    }  # fmt: skip
    return transformers.LlavaConfig, {
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": vision,
    }


def _internvl(transformers: Any) -> tuple[Any, Any]:
    vision = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": [16, 16],
        "patch_size": [4, 4],
    }  # fmt: skip
    return transformers.InternVLConfig, {
        "text_config": {**TEXT, "model_type": "qwen3"},
        "vision_config": vision,
    }


_PIXTRAL = {
    "model_type": "pixtral", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "patch_size": 4, "image_size": 64, "head_dim": 8,
}  # fmt: skip


def _llava_pixtral(transformers: Any) -> tuple[Any, Any]:
    fields = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    text = {**TEXT, "model_type": "mistral", "sliding_window": None}
    return transformers.LlavaConfig, {**fields, "text_config": text, "vision_config": _PIXTRAL}


def _mistral3(transformers: Any) -> tuple[Any, Any]:
    text = {**TEXT, "model_type": "mistral", "sliding_window": None}
    return transformers.Mistral3Config, {"text_config": text, "vision_config": _PIXTRAL}


def _ministral3(transformers: Any) -> tuple[Any, Any]:
    """Queries are scaled by their position from 16 on."""
    rope = {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
    }  # fmt: skip
    text = {**TEXT, "model_type": "ministral3", "rope_parameters": rope}
    return transformers.Mistral3Config, {"text_config": text, "vision_config": _PIXTRAL}


def _llava_next(transformers: Any) -> tuple[Any, Any]:
    _, fields = _llava(transformers)
    text = {**TEXT, "model_type": "mistral", "sliding_window": None}
    tiles = [[16, 32], [32, 16], [32, 32]]
    return transformers.LlavaNextConfig, {
        **fields,
        "text_config": text,
        "image_grid_pinpoints": tiles,
    }


def _llava_onevision(transformers: Any) -> tuple[Any, Any]:
    """The patches of images of more than two tiles are scaled down."""
    text = {**TEXT, "model_type": "qwen2"}
    tiles = [[rows * 16, columns * 16] for rows in (1, 2, 3) for columns in (1, 2, 3)]
    return transformers.LlavaOnevisionConfig, {
        "text_config": text,
        "vision_config": _SIGLIP,
        "image_grid_pinpoints": tiles,
        "vision_aspect_ratio": "anyres_max_2",
    }


def _lfm3_vl(transformers: Any) -> tuple[Any, Any]:
    vision = {
        **GRID, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "layer_types": ["conv", "full_attention"],
    }  # fmt: skip
    text = {**TEXT, "model_type": "lfm3", "layer_types": ["conv", "full_attention"] * 2}
    fields = {"projector_hidden_size": 24, "text_config": text, "vision_config": vision}
    return transformers.Lfm3VlConfig, fields


def _lfm2_vl(transformers: Any) -> tuple[Any, Any]:
    vision = {**_SIGLIP, "model_type": "siglip2_vision_model", "num_patches": 16}
    text = {
        **TEXT,
        "model_type": "lfm2",
        "layer_types": ["conv", "full_attention"] * 2,
        "block_auto_adjust_ff_dim": False,
    }
    fields = {"projector_hidden_size": 24, "text_config": text, "vision_config": vision}
    return transformers.Lfm2VlConfig, fields


def _glm46v(transformers: Any) -> tuple[Any, Any]:
    _, fields = _glm4v(transformers)
    return transformers.Glm46VConfig, {
        part: {**values, "model_type": f"glm4v_{part.removesuffix('_config')}"}
        for part, values in fields.items()
    }


def _lighton_ocr(transformers: Any) -> tuple[Any, Any]:
    text = {**TEXT, "model_type": "qwen3"}
    fields = {"spatial_merge_size": 2}
    return transformers.LightOnOcrConfig, {**fields, "text_config": text, "vision_config": _PIXTRAL}


_SIGLIP = {
    "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 16, "patch_size": 4,
}  # fmt: skip


def _smolvlm(transformers: Any) -> tuple[Any, Any]:
    vision = {**_SIGLIP, "model_type": "smolvlm_vision"}
    text = {**TEXT, "model_type": "llama"}
    return transformers.SmolVLMConfig, {
        "scale_factor": 2,
        "text_config": text,
        "vision_config": vision,
    }


def _idefics3(transformers: Any) -> tuple[Any, Any]:
    _, fields = _smolvlm(transformers)
    vision = {**_SIGLIP, "model_type": "idefics3_vision"}
    return transformers.Idefics3Config, {**fields, "vision_config": vision}


def _deepseek_vl(transformers: Any) -> tuple[Any, Any]:
    text = {**TEXT, "model_type": "llama"}
    return transformers.DeepseekVLConfig, {"text_config": text, "vision_config": _SIGLIP}


def _gemma3(transformers: Any) -> tuple[Any, Any]:
    vision = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 2,
    }  # fmt: skip
    layers = ["sliding_attention", "full_attention"] * 2
    text = {**TEXT, "sliding_window": 9, "layer_types": layers, "query_pre_attn_scalar": 8}
    fields = {
        "mm_tokens_per_image": 16,
        "boi_token_index": token(START),
        "eoi_token_index": token("<end_of_image>"),
    }
    return transformers.Gemma3Config, {**fields, "text_config": text, "vision_config": vision}


def _gemma4(transformers: Any, joint: str | None = "vision", **more: Any) -> tuple[Any, Any]:
    vision = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
        "head_dim": 8, "patch_size": 2, "pooling_kernel_size": 2, "position_embedding_size": 64,
    }  # fmt: skip
    layers = ["sliding_attention", "full_attention"] * 2
    text = {
        **TEXT, "sliding_window": 9, "layer_types": layers, "hidden_size_per_layer_input": 0, "global_head_dim": 16,
        "use_bidirectional_attention": joint, "pad_token_id": 3, **more,
    }  # fmt: skip
    fields = {"boi_token_id": token(START), "eoi_token_id": token("<end_of_image>")}
    return transformers.Gemma4Config, {**fields, "text_config": text, "vision_config": vision}


def _gemma4_small(transformers: Any) -> tuple[Any, Any]:
    inputs = {
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 304,
        "num_kv_shared_layers": 2,
    }
    return _gemma4(transformers, joint=None, **inputs)


def _gemma4_unified(transformers: Any) -> tuple[Any, Any]:
    """Without a tower: the patches of an image are projected one by one."""
    _, fields = _gemma4(transformers)
    unknown = ("hidden_size_per_layer_input",)
    text = {name: value for name, value in fields["text_config"].items() if name not in unknown}
    vision = {
        "patch_size": 4,
        "pooling_kernel_size": 1,
        "mm_embed_dim": 16,
        "mm_posemb_size": 64,
        "output_proj_dims": 16,
    }
    return transformers.Gemma4UnifiedConfig, {
        **fields,
        "text_config": text,
        "vision_config": vision,
        "audio_config": None,
    }


def _qianfan_ocr(transformers: Any) -> tuple[Any, Any]:
    _, fields = _internvl(transformers)
    return transformers.QianfanOCRConfig, fields


def _aya_vision(transformers: Any) -> tuple[Any, Any]:
    """Its whole model in transformers leaves the factor on logits out, which transformers' language model applies."""
    text = {
        **TEXT,
        "model_type": "cohere2",
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "logit_scale": 1.0,
    }
    return transformers.AyaVisionConfig, {"text_config": text, "vision_config": _SIGLIP}


def _minicpmv4_6(transformers: Any) -> tuple[Any, Any]:
    _, fields = _qwen3_5(transformers)
    vision = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 32, "patch_size": 2,
    }  # fmt: skip
    text = {**fields["text_config"], "model_type": "qwen3_5_text"}
    return transformers.MiniCPMV4_6Config, {
        "text_config": text,
        "vision_config": vision,
        "insert_layer_id": 1,
    }


def _ovis2(transformers: Any) -> tuple[Any, Any]:
    """A tile has 4 x 4 patches, of which 2 x 2 make a vector."""
    vision = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 4,
        "hidden_stride": 2, "vocab_size": 40,
    }  # fmt: skip
    same = {name: TEXT[name] for name in ("hidden_size", "vocab_size")}
    return transformers.Ovis2Config, {
        **same,
        "text_config": {**TEXT, "model_type": "qwen2"},
        "vision_config": vision,
        "visual_indicator_token_ids": [token(name) for name in BORDERS],
    }


def _cohere2_vision(transformers: Any) -> tuple[Any, Any]:
    """Its image processor calls the side of a tile in tokens patch_size, which is the encoder's patch_size too."""
    _, fields = _aya_vision(transformers)
    vision = {**_SIGLIP, "image_size": 8, "patch_size": 2}
    return transformers.Cohere2VisionConfig, {
        **fields,
        "vision_config": vision,
        "alignment_intermediate_size": 24,
    }


def _rotating(sections: list[int]) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}
    return {**TEXT, "rope_parameters": rope}


MODELS: Mapping[str, Callable[[Any], tuple[Any, Any]]] = {
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl_moe,
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe": _qwen3_5_moe,
    "glm4v": _glm4v,
    "glm4v_moe": _glm4v_moe,
    "glm_ocr": _glm_ocr,
    "paddleocr_vl": _paddleocr_vl,
    "exaone4_5": _exaone4_5,
    "llava": _llava,
    "internvl": _internvl,
    "llava_pixtral": _llava_pixtral,
    "mistral3": _mistral3,
    "ministral3": _ministral3,
    "llava_next": _llava_next,
    "lfm2_vl": _lfm2_vl,
    "lfm3_vl": _lfm3_vl,
    "glm46v": _glm46v,
    "lighton_ocr": _lighton_ocr,
    "smolvlm": _smolvlm,
    "idefics3": _idefics3,
    "deepseek_vl": _deepseek_vl,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "gemma4_small": _gemma4_small,
    "gemma4_unified": _gemma4_unified,
    "qianfan_ocr": _qianfan_ocr,
    "aya_vision": _aya_vision,
    "cohere2_vision": _cohere2_vision,
    "llava_onevision": _llava_onevision,
    "ovis2": _ovis2,
    "minicpmv4_6": _minicpmv4_6,
}
WITHOUT_VIDEOS = (
    "lfm2_vl",
    "ministral3",
    "llava_next",
    "lighton_ocr",
    "smolvlm",
    "idefics3",
    "deepseek_vl",
    "llava",
    "internvl",
    "llava_pixtral",
    "mistral3",
    "gemma3",
    "qianfan_ocr",
    "aya_vision",
    "cohere2_vision",
    "ovis2",
)
"""Models whose configuration has no token for videos."""

"""The fields of Megatron-Bridge's provider for Gemma 3 that its general providers don't have.

    transformer_layer_spec: {_target_: megatron.bridge.models.gemma.gemma3_provider.gemma3_layer_spec, _call_: false}
    window_size: 1024                   the keys that a token sees, with its own one
    interleaved_attn_pattern: [5, 1]    five layers with a window, then one without
    rotary_base: [10000, 1000000]       of layers with a window, and of all others
    vision_projector_config: {_target_: ….Gemma3VLMultimodalProjectorConfig, input_size: 1152, …}

Source: gemma3_provider.py, gemma3_vl_provider.py and modeling_gemma3_vl.py of Megatron-Bridge 0.6.2; SiglipVisionConfig
and Gemma3MultiModalProjector of transformers.
"""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from megaconv.errors import NotExpressible
from megaconv.families.parts.towers import VISION
from megaconv.model.config import ModelConfig

_MODULE = "megatron.bridge.models.gemma.gemma3_provider"
_PROJECTOR = "megatron.bridge.models.gemma_vl.modeling_gemma3_vl.Gemma3VLMultimodalProjectorConfig"
GEMMA3 = "gemma3_text"
BUILT_BY_GEMMA3 = ("sandwich_norm", "two_ropes", "scaled_embedding")
"""Features of a model that this provider's layers and its embedding compute."""
_VISION_DEFAULTS = {"hidden_size": 768, "image_size": 224, "patch_size": 16, "layer_norm_eps": 1e-6}
"""The values of SiglipVisionConfig for keys that a config.json leaves out."""
_IMAGE_TOKENS = "mm_tokens_per_image"


def gemma3_fields(config: ModelConfig, args: Namespace) -> dict[str, Any]:
    """The fields for the language model. Raises NotExpressible for windows without a regular pattern.

    The provider has a default for attention's scale, so its scale is always written.
    """
    attention = config.attention
    scale = attention.head_dim**-0.5 if attention.scale is None else attention.scale
    return {
        "_target_": f"{_MODULE}.Gemma3ModelProvider",
        "transformer_layer_spec": {"_target_": f"{_MODULE}.gemma3_layer_spec", "_call_": False},
        "softmax_scale": scale,
        **_window(config, args),
    }


def _window(config: ModelConfig, args: Namespace) -> dict[str, Any]:
    """The window's size, and the pattern: every layer whose number is a multiple of its sum has no window."""
    has_window = _layers_with_window(config.layer_count, args)
    without = [number for number, windowed in enumerate(has_window, 1) if not windowed]
    period = without[0] if without else config.layer_count + 1
    regular = [bool(number % period) for number in range(1, config.layer_count + 1)]
    if args.window_size is None or has_window != regular:
        raise NotExpressible(
            f"layers without a window: {without}; Megatron-Bridge's Gemma 3 has them at equal distances (6, 12, 18 ...); "
            "leave out --option for=megatron-bridge"
        )
    before_own, _ = args.window_size
    return {
        "window_size": before_own + 1,
        "window_attn_skip_freq": None,
        "interleaved_attn_pattern": [period - 1, 1],
    }


def _layers_with_window(layers: int, args: Namespace) -> list[bool]:
    frequency = args.window_attn_skip_freq
    if isinstance(frequency, int):
        return [bool(number % frequency) for number in range(1, layers + 1)]
    return [True] * layers if frequency is None else [bool(windowed) for windowed in frequency]


def gemma3_projector(whole: Mapping[str, Any], args: Namespace) -> dict[str, Any]:
    """The fields for the projector of images. whole: the config.json of the multimodal model. args: of its language model."""
    vision = {**_VISION_DEFAULTS, **whole.get(VISION, {})}
    image_tokens = whole.get(_IMAGE_TOKENS, 256)
    projector = {
        "_target_": _PROJECTOR,
        "input_size": vision["hidden_size"],
        "hidden_size": args.hidden_size,
        "image_size": vision["image_size"],
        "patch_dim": vision["patch_size"],
        "tokens_per_image": image_tokens,
        "layernorm_epsilon": vision["layer_norm_eps"],
    }
    return {"vision_projector_config": projector, _IMAGE_TOKENS: image_tokens}

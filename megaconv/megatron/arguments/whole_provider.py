"""The fields of a Megatron-Bridge provider that builds a multimodal model, beside those of its language model.

    _target_: megatron.bridge.models.qwen_vl.qwen25_vl_provider.Qwen25VLModelProvider
    vision_config: {_target_: transformers.models.qwen2_5_vl. … .Qwen2_5_VLVisionConfig, depth: 32, …}
    mrope_section: [16, 24, 24]
    image_token_id: 151655

Bridge builds the encoder from transformers' own configuration, so vision_config has the keys of config.json. Source: the
providers below megatron/bridge/models and their provider_bridge(), Megatron-Bridge 0.6.2.
"""

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from megaconv.errors import NotExpressible
from megaconv.families.parts.language_model import TEXT
from megaconv.families.parts.towers import VISION
from megaconv.families.parts.whole_model import named
from megaconv.megatron.arguments.gemma3_provider import BUILT_BY_GEMMA3, gemma3_projector
from megaconv.model.beside import Whole

_BRIDGE, _TRANSFORMERS = "megatron.bridge.models", "transformers.models"
_ENGINE = "transformer_engine"


@dataclass(frozen=True)
class Provider:
    """A provider of Bridge's for one kind of multimodal model."""

    target: str
    config: str
    """The class of transformers' configuration that the encoder is built from."""
    tokens: Mapping[str, str]
    """Field -> key of config.json, for the tokens of images, of audio, and of the text's ends."""
    only: Mapping[str, Any] = field(default_factory=dict)
    """Keys of vision_config with the only value that the provider's own encoder computes."""
    needs_engine: bool = False
    """True if the provider builds Transformer Engine's layers, whatever its fields say."""
    holder: str = VISION
    """The field with this configuration. `hf_config` is the config.json of the whole model."""
    layers: str = ""
    """The function that specifies the layers, if core's own one for a GPTModel doesn't."""
    builds: tuple[str, ...] = ()
    """Features of a language model that the general providers don't build, and this one does."""
    section: tuple[int, ...] = ()
    """transformers' mrope section of a config.json without one."""
    text: str = ""
    """The model_type of the only language model that it builds, where the model has several kinds."""
    further: Callable[[Mapping[str, Any], Namespace], dict[str, Any]] | None = None
    """Gives the fields that this provider alone has, from config.json and the language model's arguments."""


def _same(*names: str) -> Mapping[str, str]:
    return MappingProxyType({name: name for name in names})


def _exaone_text(whole: Mapping[str, Any], args: Namespace) -> dict[str, Any]:
    """The configuration of EXAONE's language model, which names its positions, and its vocabulary, which Bridge doesn't pad."""
    target = f"{_TRANSFORMERS}.exaone4.configuration_exaone4.Exaone4Config"
    text = {"_target_": target, **whole[TEXT]}
    return {"hf_text_config": text, "vocab_size": args.padded_vocab_size}


_ENDS = ("bos_token_id", "eos_token_id")
_OF_QWEN = _same(
    *_ENDS, "vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id"
)
_QWEN_3 = {"hidden_act": "gelu_pytorch_tanh"}
_OF_GLM = _same(
    *("eos_token_id", "image_start_token_id", "image_end_token_id", "image_token_id"),
    *("video_start_token_id", "video_end_token_id", "video_token_id"),
)
_OF_GEMMA = {
    **_same(*_ENDS),
    "vision_start_token_id": "boi_token_index",
    "vision_end_token_id": "eoi_token_index",
    "image_token_id": "image_token_index",
}
_QWEN_35 = Provider(
    f"{_BRIDGE}.qwen_vl.qwen35_vl_provider.Qwen35VLModelProvider",
    f"{_TRANSFORMERS}.qwen3_5.configuration_qwen3_5.Qwen3_5VisionConfig",
    _OF_QWEN,
    only=_QWEN_3,
    needs_engine=True,
    layers="megatron.core.models.gpt.experimental_attention_variant_module_specs."
    "get_transformer_block_with_experimental_attention_variant_spec",
    builds=("linear_layers",),
    section=(11, 11, 10),
)
PROVIDERS: Mapping[str, Provider] = MappingProxyType(
    {
        "qwen2_5_vl": Provider(
            f"{_BRIDGE}.qwen_vl.qwen25_vl_provider.Qwen25VLModelProvider",
            f"{_TRANSFORMERS}.qwen2_5_vl.configuration_qwen2_5_vl.Qwen2_5_VLVisionConfig",
            {**_OF_QWEN, "vision_token_id": "vision_token_id"},
        ),
        "qwen3_vl": Provider(
            f"{_BRIDGE}.qwen_vl.qwen3_vl_provider.Qwen3VLModelProvider",
            f"{_TRANSFORMERS}.qwen3_vl.configuration_qwen3_vl.Qwen3VLVisionConfig",
            _OF_QWEN,
            only=_QWEN_3,
            needs_engine=True,
        ),
        "qwen3_vl_moe": Provider(
            f"{_BRIDGE}.qwen_vl.qwen3_vl_provider.Qwen3VLMoEModelProvider",
            f"{_TRANSFORMERS}.qwen3_vl_moe.configuration_qwen3_vl_moe.Qwen3VLMoeVisionConfig",
            _OF_QWEN,
            only=_QWEN_3,
            needs_engine=True,
        ),
        "glm4v_moe": Provider(
            f"{_BRIDGE}.glm_vl.glm_45v_provider.GLM45VModelProvider",
            f"{_TRANSFORMERS}.glm4v_moe.configuration_glm4v_moe.Glm4vMoeVisionConfig",
            _OF_GLM,
        ),
        "gemma3": Provider(
            f"{_BRIDGE}.gemma_vl.gemma3_vl_provider.Gemma3VLModelProvider",
            f"{_TRANSFORMERS}.siglip.configuration_siglip.SiglipVisionConfig",
            _OF_GEMMA,
            needs_engine=True,
            builds=BUILT_BY_GEMMA3,
            further=gemma3_projector,
        ),
        "mistral3": Provider(
            f"{_BRIDGE}.ministral3.ministral3_provider.Ministral3ModelProvider",
            f"{_TRANSFORMERS}.mistral3.configuration_mistral3.Mistral3Config",
            {"image_token_id": "image_token_index"},
            needs_engine=True,
            holder="hf_config",
            layers=f"{_BRIDGE}.ministral3.ministral3_provider.ministral_layer_spec",
            text="ministral3",
        ),
        "qwen3_5": _QWEN_35,
        "qwen3_5_moe": replace(
            _QWEN_35,
            target=f"{_BRIDGE}.qwen_vl.qwen35_vl_provider.Qwen35VLMoEModelProvider",
            config=f"{_TRANSFORMERS}.qwen3_5_moe.configuration_qwen3_5_moe.Qwen3_5MoeVisionConfig",
        ),
        "exaone4_5": Provider(
            f"{_BRIDGE}.exaone.exaone45.exaone45_provider.Exaone45ModelProvider",
            f"{_TRANSFORMERS}.exaone4_5.configuration_exaone4_5.Exaone4_5_VisionConfig",
            {**_OF_QWEN, "vision_token_id": "vision_token_id"},
            only={"hidden_act": "silu"},
            needs_engine=True,
            layers=f"{_BRIDGE}.exaone.exaone45.exaone45_provider.exaone_45_transformer_layer_spec",
            builds=("output_norm",),
            further=_exaone_text,
        ),
        "qwen2_audio": Provider(
            f"{_BRIDGE}.qwen_audio.qwen2_audio_provider.Qwen2AudioModelProvider",
            f"{_TRANSFORMERS}.qwen2_audio.configuration_qwen2_audio.Qwen2AudioConfig",
            {**_same(*_ENDS, "pad_token_id"), "audio_token_id": "audio_token_index"},
            holder="hf_config",
        ),
    }
)
"""model_type -> its provider."""


def provider_of(whole: Whole) -> Provider:
    """The provider of a multimodal model. Raises NotExpressible, which names the model, if no provider is known."""
    provider = PROVIDERS.get(str(whole.config.get("model_type")))
    if provider is None:
        raise NotExpressible(
            f"{named(whole.config)}: no Megatron-Bridge provider of this multimodal model is written; "
            f"leave out --option for=megatron-bridge, or pass --text-only; known: {', '.join(PROVIDERS)}"
        )
    text = (whole.config.get(TEXT) or {}).get("model_type")
    if provider.text not in ("", text):
        raise NotExpressible(
            f"{named(whole.config)}: its language model is {text}; Megatron-Bridge builds this multimodal model with "
            f"{provider.text} alone; leave out --option for=megatron-bridge, or pass --text-only"
        )
    return provider


def whole_fields(whole: Whole, args: Namespace) -> dict[str, Any]:
    """The fields that replace and complete those of the language model by itself.

    args: the arguments that are written for Megatron-LM, with mrope_section.
    Raises NotExpressible for a model whose provider isn't known, and for layers that the provider doesn't build.
    """
    provider = provider_of(whole)
    if provider.needs_engine and args.transformer_impl != _ENGINE:
        raise NotExpressible(
            f"--transformer-impl {args.transformer_impl}: Megatron-Bridge builds {named(whole.config)} of Transformer Engine's "
            "layers alone; leave it out"
        )
    described = whole.config if provider.holder != VISION else whole.config.get(VISION, {})
    for key, value in provider.only.items():
        if described.get(key, value) != value:
            raise NotExpressible(
                f"{named(whole.config)}: {VISION}.{key} is {described[key]!r:.40}; the encoder that Megatron-Bridge builds "
                f"computes {value} alone"
            )
    fields: dict[str, Any] = {
        "_target_": provider.target,
        provider.holder: {"_target_": provider.config, **described},
        **_tokens(whole.config, provider),
    }
    if provider.layers:
        fields["transformer_layer_spec"] = {"_target_": provider.layers, "_call_": False}
    if provider.further is not None:
        fields |= provider.further(whole.config, args)
    section = getattr(args, "mrope_section", None) or provider.section
    if section:
        fields |= {"position_embedding_type": "mrope", "mrope_section": list(section)}
    return fields


def _tokens(config: Mapping[str, Any], provider: Provider) -> dict[str, Any]:
    """The tokens that config.json states for the whole model, or for its language model."""
    text = config.get(TEXT) or {}
    found = {}
    for name, key in provider.tokens.items():
        for part in (config, text):
            if name not in found and part.get(key) is not None:
                found[name] = part[key]
    return found

"""Layers that Megatron-Bridge and NeMo 2 build of modules of their own, beside the fields of a provider.

    model:
      _target_: megatron.bridge.models.gemma.gemma2_provider.Gemma2ModelProvider
      transformer_layer_spec: {_target_: megatron.bridge.models.gemma.gemma2_provider.gemma2_layer_spec, _call_: false}

The fields and the tensors describe most of these models. Others need their config.json, since their modules compute
what no field says: a window in every second layer, other rope or scaled scores in some layers, multipliers. The
Python module that defines a provider or a layer spec tells them apart. Source: megatron/bridge/models of
Megatron-Bridge 0.3.1 to 0.6.2, nemo/collections/llm/gpt/model of NeMo 2.6.2.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from formats.yaml_file import Tagged
from megaconv.errors import UnknownFamily

SPECS = ("transformer_layer_spec", "mamba_stack_spec", "hybrid_stack_spec")
"""Fields with the function that specifies the layers."""
_BRIDGE, _NEMO = "megatron.bridge.", "nemo."
_OWNERS = {_BRIDGE: "Megatron-Bridge", _NEMO: "NeMo"}
_KINDS = ("_provider", "_builder", "_bridge")
"""Endings of the names of Bridge's modules."""
_DESCRIBED = {
    _BRIDGE: (
        *("gpt", "mla", "hybrid", "mamba", "t5"),
        *("deepseek", "exaone_moe", "gemma", "gemma2", "gemma3", "glm45", "gpt_oss", "kimi"),
        *("llama", "llama_nemotron", "minimax_m2", "mistral", "nemotron", "nemotron_h"),
        *("olmoe", "qwen"),
    ),
    _NEMO: (
        *("base", "baichuan", "chatglm", "deepseek", "gemma", "gpt_oss", "llama", "llama_nemotron"),
        *("mistral", "mixtral", "nemotron", "phi3mini", "qwen2", "qwen3", "ssm", "starcoder"),
        "starcoder2",
    ),
}
"""Modules whose models the fields and the tensors describe, together with window_fields()."""


def require_described(fields: Mapping[str, Any], where: str) -> None:
    """Raises UnknownFamily, which names the module, for layers that compute more than the fields say.

    where: the file, for messages.
    """
    for name, target in _targets(fields):
        owner = next((prefix for prefix in _OWNERS if target.startswith(prefix)), None)
        if owner is not None and _subject(target) not in _DESCRIBED[owner]:
            raise UnknownFamily(
                f"{where}: {name} is {target:.150}; such layers of {_OWNERS[owner]} compute what no setting says; "
                "pass --config with the Hugging Face directory of the model"
            )


def window_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The windows of Gemma 2 and 3 as core's fields: [keys before the own one, 0], and the layers without a window.

    Gemma 2 has a window in each second layer, beginning with the first, and Gemma 3 in all but the last of a pattern.
    """
    size = fields.get("window_size")
    if not size:
        return {}
    subjects = {_subject(target) for _, target in _targets(fields) if target.startswith(_BRIDGE)}
    if "gemma2" in subjects:
        return {"window_attn_skip_freq": 2}
    pattern = fields.get("interleaved_attn_pattern")
    if type(size) is int and isinstance(pattern, (list, tuple)):
        return {"window_size": [size - 1, 0], "window_attn_skip_freq": sum(pattern)}
    return {}


def target_of(value: Any) -> str:
    """The dotted name of a class or function in any of YAML's spellings; empty for any other value."""
    if isinstance(value, dict):
        value = value.get("_target_")
    if isinstance(value, Tagged):
        value = value.tag.partition("python/name:")[2]
    return value if isinstance(value, str) else ""


def _targets(fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(field, dotted name) of the provider itself and of the functions that specify its layers."""
    provider = fields.get("_target_")
    if isinstance(provider, str):
        yield "_target_", provider
    for name in SPECS:
        if target := target_of(fields.get(name)):
            yield name, target


def _subject(target: str) -> str:
    """The module that defines a class or function: `gemma2` for `….gemma.gemma2_provider.gemma2_layer_spec`."""
    module = target.rpartition(".")[0].rpartition(".")[2]
    for ending in _KINDS:
        module = module.removesuffix(ending)
    return module

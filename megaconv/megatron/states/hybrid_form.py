"""A model whose layers are a mixer and an MLP in the form of Megatron core's HybridModel, which has a layer for each of both.

    GPTModel       decoder.layers.3.self_attention...     decoder.layers.3.mlp...    decoder.final_layernorm
    HybridModel    decoder.layers.6.self_attention...     decoder.layers.7.mlp...    decoder.final_norm

    G a gated delta net        * attention        - an MLP        E experts        | between stages        / before MTP layers

megaconv describes both as the same model. This form is read as GPTModel's names and arguments, and written from them. Other
hybrids are described as Megatron has them (megaconv/model/pattern.py). Source: hybrid_block.py, hybrid_layer_allocation.py and
gpt_checkpoint_interop.py of megatron-core 0.19.2.
"""

import re
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from megaconv.errors import NotExpressible, UnknownFamily, UsageError
from megaconv.megatron.states.ranks import Ranks
from megaconv.megatron.states.recipient import FOR
from megaconv.model.config import ModelConfig
from megaconv.model.layout import Layout
from megaconv.model.predicting import HYBRID_MTP

Tensor = TypeVar("Tensor")

MODEL = "model"
"""The saver's option: the class of Megatron core that loads the output."""
MODEL_CLASS = "megaconv_model_class"
"""megaconv's own argument while it converts: the class that saved the source."""
GPT, HYBRID = "gpt", "hybrid"

_MIXERS = {"linear": "G", "attention": "*"}
_MLPS = {"dense": "-", "experts": "E"}
_PAIRS = re.compile(rf"(?:[{''.join(_MIXERS.values())}][{''.join(_MLPS.values())}])+")
_UNSUPPORTED = {"D": "sparse attention", "+": "latent attention"}
_KNOWN = frozenset("MG*-E")

_LAYER = re.compile(r"(.*\b(?<!vision_model\.)decoder\.layers\.)(\d+)\.(.+)")
_MTP = re.compile(r"(.*\bmtp\.layers\.\d+\.)transformer_layer\.(.+)")
_MTP_PART = re.compile(
    r"(.*\bmtp\.layers\.\d+\.)(?:mtp_model_layer|transformer_layer)\.layers\.[01]\.(.+)"
)
_OF_MLP = ("mlp.", "pre_mlp_layernorm.")
_NORM, _HYBRID_NORM = "decoder.final_layernorm.", "decoder.final_norm."


def hybrid_name(name: str) -> str:
    """HybridModel's name of a tensor, from GPTModel's."""
    if found := _LAYER.fullmatch(name):
        return f"{found[1]}{2 * int(found[2]) + found[3].startswith(_OF_MLP)}.{found[3]}"
    if found := _MTP.fullmatch(name):
        part = int(found[2].startswith(_OF_MLP))
        return f"{found[1]}mtp_model_layer.layers.{part}.{found[2]}"
    return name.replace(_NORM, _HYBRID_NORM)


def gpt_name(name: str) -> str:
    """GPTModel's name of a tensor, from HybridModel's name in a model of pairs."""
    if found := _LAYER.fullmatch(name):
        return f"{found[1]}{int(found[2]) // 2}.{found[3]}"
    if found := _MTP_PART.fullmatch(name):
        return f"{found[1]}transformer_layer.{found[2]}"
    return name.replace(_HYBRID_NORM, _NORM)


def is_of_pairs(args: Namespace) -> bool:
    """True if each mixer of a HybridModel has an MLP after it, so that the model is a GPTModel too.

    A Nemotron-H without Mamba layers, whose attention has no positions, stays a hybrid. Raises UnknownFamily, which names the
    symbol, for a pattern that megaconv can't read.
    """
    pattern = _pattern(args)
    if pattern is None:
        return False
    main, *predicting = pattern.split("/")
    layers = main.replace("|", "")
    _require_known(layers)
    is_pairs = _PAIRS.fullmatch(layers) is not None
    has_positions = getattr(args, "position_embedding_type", "none") != "none"
    if not is_pairs or ("G" not in layers and not has_positions):
        if "G" in layers:
            raise UnknownFamily(
                f"the checkpoint's hybrid_layer_pattern is {pattern!r:.100}: megaconv reads a gated delta net (G) only in a model "
                "whose layers are G or *, and - or E, by turns"
            )
        if any(predicting) and (predicting != [HYBRID_MTP] or "E" not in layers):
            raise UnknownFamily(
                f"the checkpoint's hybrid_layer_pattern is {pattern!r:.100}: megaconv reads one MTP layer (after '/') of such a model, "
                f"of attention and experts ({HYBRID_MTP}), and only beside other layers with experts; save the checkpoint without it"
            )
        return False
    if any(part not in ("", "*-", "*E") for part in predicting):
        raise UnknownFamily(
            f"the checkpoint's hybrid_layer_pattern is {pattern!r:.100}: megaconv reads MTP layers (after '/') of one attention "
            "and an MLP, *- or *E"
        )
    return True


def _pattern(args: Namespace) -> str | None:
    for name in ("hybrid_layer_pattern", "hybrid_override_pattern"):
        pattern = getattr(args, name, None)
        if isinstance(pattern, str) and pattern:
            return pattern
    return None


def _require_known(layers: str) -> None:
    for symbol in layers:
        if symbol not in _KNOWN:
            what = f" ({_UNSUPPORTED[symbol]})" if symbol in _UNSUPPORTED else ""
            raise UnknownFamily(
                f"the checkpoint's hybrid_layer_pattern has {symbol!r}{what}, which megaconv doesn't read in a HybridModel; "
                f"supported: {', '.join(sorted(_KNOWN))}"
            )


def read_as_gpt(args: Namespace) -> Namespace:
    """The arguments of a GPTModel that is the same model as this HybridModel of pairs.

    Raises UnknownFamily for a pipeline stage that ends between a mixer and its MLP.
    """
    pattern = _pattern(args) or ""
    main = pattern.split("/")[0]
    layers = main.replace("|", "")
    delta_nets = [int(symbol == "G") for symbol in layers[::2]]
    read: dict[str, Any] = {
        "num_layers": len(layers) // 2,
        "encoder_num_layers": len(layers) // 2,
        "hybrid_layer_pattern": None,
        "hybrid_override_pattern": None,
        "is_hybrid_model": False,
        "spec": None,
        MODEL_CLASS: HYBRID,
    }
    if any(delta_nets):
        read |= {
            "experimental_attention_variant": "gated_delta_net",
            "linear_attention_freq": delta_nets,
        }
    if "|" in main:
        stages = [_halved(len(stage), "a pipeline stage") for stage in main.split("|")]
        read["pipeline_model_parallel_layout"] = "E" + "|".join("t" * each for each in stages) + "L"
    for name in ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"):
        value = getattr(args, name, None)
        if type(value) is int:
            read[name] = _halved(value, name)
    return Namespace(**{**vars(args), **read})


def _halved(layers: int, what: str) -> int:
    if layers % 2:
        raise UnknownFamily(
            f"the checkpoint's hybrid_layer_pattern: {what} has {layers} layers, so that it ends between a mixer and its MLP; megaconv "
            "reads such a model if its stages have pairs of both: save it with other stages"
        )
    return layers // 2


def writes_hybrid(asked: Mapping[str, str], arguments: Mapping[str, Any]) -> bool:
    """True for an output in this form: by the option, otherwise as the source. Raises UsageError for an unknown class.

    asked: the saver's options. arguments: those of the source's run.
    """
    as_source = GPT if FOR in asked else str(arguments.get(MODEL_CLASS, GPT))
    found = asked.get(MODEL) or as_source
    if found not in (GPT, HYBRID):
        raise UsageError(f"--option {MODEL}={found}: is not known; choose {GPT} or {HYBRID}")
    return found == HYBRID


def require_pairs(config: ModelConfig) -> None:
    """Raise NotExpressible for a model that HybridModel doesn't compute, or that has no pairs of a mixer and an MLP."""
    others = (
        config.has("mla"), config.has("skips_rope"), any(each.window is not None for each in config.layers),
        config.positions.scaling is not None, config.norm.place != "before", config.whole is not None,
        config.has("encoder"), config.has("retrieval"),
    )  # fmt: skip
    words = (
        "latent attention", "layers without rotary positions", "windows", "scaled rotary positions", "norms after sublayers",
        "a vision or audio encoder", "an encoder", "retrieval",
    )  # fmt: skip
    for applies, what in zip(others, words, strict=True):
        if applies:
            raise NotExpressible(
                f"--option {MODEL}={HYBRID}: the model has {what}, which megaconv doesn't write for HybridModel; leave the option out"
            )
    for layer, kind in enumerate(config.layers):
        if kind.mixer not in _MIXERS or kind.mlp not in _MLPS:
            raise NotExpressible(
                f"--option {MODEL}={HYBRID}: layer {layer} is {kind.mixer!r} and {kind.mlp!r}; expected a gated delta net or attention, "
                "and an MLP or experts; leave the option out"
            )


def hybrid_arguments(config: ModelConfig, layout: Layout) -> dict[str, Any]:
    """The arguments of a HybridModel in place of a GPTModel's. Raises NotExpressible."""
    require_pairs(config)
    pairs = [_MIXERS[kind.mixer] + _MLPS[kind.mlp] for kind in config.layers]
    stages = ("".join(pairs[each.first_layer :][: each.layers]) for each in layout.chunks())
    predicting = ("/*" + _MLPS[config.layers[-1].mlp]) * config.mtp_layers
    return {
        "num_layers": 2 * config.layer_count,
        "encoder_num_layers": 2 * config.layer_count,
        "hybrid_layer_pattern": "|".join(stages) + predicting,
        "hybrid_override_pattern": None,
        "is_hybrid_model": True,
        "spec": ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"],
        "experimental_attention_variant": None,
        "linear_attention_freq": None,
        "moe_layer_freq": 1,
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None,
        "pipeline_model_parallel_layout": None,
        "num_layers_per_virtual_pipeline_stage": None,
    }


def with_gpt_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a HybridModel of pairs under GPTModel's names."""
    return {gpt_name(name): tensor for name, tensor in tensors.items()}


def ranks_as_gpt(ranks: Ranks) -> Ranks:
    """The rank files of a HybridModel of pairs under GPTModel's names.

    Raises UnknownFamily for a pipeline stage that ends between a mixer and its MLP.
    """
    found = {}
    for rank, chunks in ranks.weights.items():
        for chunk in chunks:
            layers = {int(layer[2]) for name in chunk if (layer := _LAYER.fullmatch(name))}
            _halved(len(layers), "a pipeline stage")
        found[rank] = [with_gpt_names(chunk) for chunk in chunks]
    return replace(ranks, weights=found)

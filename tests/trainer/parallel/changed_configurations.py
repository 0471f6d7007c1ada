"""Tiny models of transformers with some fields of their configuration changed, and what the trainer makes of the same files."""

import json
import logging
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megaconv.errors import CheckpointError
from megaconv.model.layout import Layout
from megatron_lite.checkpoint.restore import open_weights
from megatron_lite.checkpoint.weights import load_weights
from megatron_lite.engine import Engine
from megatron_lite.models.batch import Microbatch
from megatron_lite.models.trainable import TRAINED
from megatron_lite.parallel.grid import make_grid
from megatron_lite.settings.architecture import OF_THEIR_OWN
from megatron_lite.settings.options import ModelOptions
from megatron_lite.settings.sizes import check_sizes
from tests.transformers_oracle import (
    BEYOND_MEGATRON,
    GPT2_SIZES,
    LAYERS,
    MIXTURES,
    NAMED,
    OTHER_EPSILONS,
    RELATIVES,
    SIZES,
    VARIANTS,
    VOCAB,
    Variant,
    family_of,
    load,
    make_config,
    model_class,
    rope,
)

Changes = Mapping[str, Any]

TOLERANCE = 1e-4
"""The largest difference of logits relative to the largest logit; or twice the distance of transformers' float32 from
its float64."""
DRAWS = 3
"""Further float32 runs of transformers where one is not enough: how far a single run strays is luck."""
TOKENS = torch.randint(7, VOCAB, (2, 32), generator=torch.Generator().manual_seed(4))
"""More than any window."""

BASES: dict[str, Variant] = {
    name: next(
        variant
        for variant in {**VARIANTS, **MIXTURES, **NAMED, **BEYOND_MEGATRON}.values()
        if family_of(variant) == name
    )
    for name in TRAINED
    if name not in OF_THEIR_OWN and name not in RELATIVES
}
"""Family -> the model whose configuration is changed."""

_NOT_COMPUTED = (
    *(
        "architectures",
        "model_type",
        "transformers_version",
        "dtype",
        "_name_or_path",
        "bos_token_id",
        "eos_token_id",
    ),
    *(
        "return_dict",
        "output_hidden_states",
        "output_attentions",
        "use_cache",
        "initializer_range",
        "id2label",
        "label2id",
    ),
)
"""Keys that nothing is computed from."""
_ROPE = {"rope_theta": 5e3}
_YARN = {**_ROPE, "rope_type": "yarn", "factor": 4.0}
_KNOWN_RANGE = {"original_max_position_embeddings": 24}
_LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_ROPES: tuple[Changes, ...] = (
    {"rope_type": "default", "rope_theta": 777.0},
    {**_ROPE, "rope_type": "linear", "factor": 2.0},
    {**_ROPE, "rope_type": "dynamic", "factor": 2.0},
    _YARN,
    {**_YARN, **_KNOWN_RANGE},
    {**_YARN, **_KNOWN_RANGE, "attention_factor": 1.3},
    {**_YARN, **_KNOWN_RANGE, "mscale": 0.7, "mscale_all_dim": 1.0},
    {**_YARN, **_KNOWN_RANGE, "mscale_all_dim": 1.0},
    {**_YARN, **_KNOWN_RANGE, "beta_fast": 8.0, "beta_slow": 0.5, "truncate": False},
    {**_ROPE, **_LLAMA3, **_KNOWN_RANGE},
    {**_ROPE, **_KNOWN_RANGE, "rope_type": "longrope", "factor": 4.0},
    {**_ROPE, "rope_type": "default", "partial_rotary_factor": 0.5},
    {**_ROPE, "rope_type": "default", "partial_rotary_factor": 0.25},
)
_ACTIVATIONS = (
    "silu",
    "swish",
    "gelu",
    "gelu_new",
    "gelu_fast",
    "gelu_pytorch_tanh",
    "relu",
    "relu2",
    "quick_gelu",
)
_FULL, _WINDOW = "full_attention", "sliding_attention"
_ATTENTIONS = (
    [_FULL] * LAYERS,
    [_WINDOW] * LAYERS,
    [_WINDOW, _FULL] * (LAYERS // 2),
    [_FULL, _WINDOW] * (LAYERS // 2),
)
_BY_NAME: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("rope_parameters", "rope_scaling"), _ROPES),
    **dict.fromkeys(
        ("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act"), _ACTIVATIONS
    ),
    "layer_types": _ATTENTIONS,
    "mlp_layer_types": (
        ["dense"] * LAYERS,
        ["sparse"] * LAYERS,
        ["sparse", "dense"] * (LAYERS // 2),
    ),
    "scoring_func": ("softmax", "sigmoid"),
    "topk_method": ("greedy", "group_limited_greedy", "noaux_tc"),
}
"""Values to try in place of a key's."""
_LISTS: tuple[list[int], ...] = ([], [0], [1], [0, 2], [1, 0, 1, 0], [0] * LAYERS, [1] * LAYERS)


def alternatives(key: str, value: Any) -> tuple[Any, ...]:
    """Values to try in place of this one."""
    if key in _NOT_COMPUTED:
        return ()
    found = _BY_NAME.get(key)
    if found is None and isinstance(value, bool):
        found = (not value,)
    elif found is None and "eps" in key:
        found = (1e-12, 1e-6, 1e-2)
    elif found is None and isinstance(value, int):
        found = (0, 1, 2, 3, 4, 8, 16, value // 2, value * 2, None)
    elif found is None and isinstance(value, float):
        found = (0.0, 0.5, 1.0, 1.7, 2.5, value * 2, None)
    elif found is None and value is None:
        found = (0, 1, 2, 4, 8, 0.5, True, False)
    elif found is None:
        found = _LISTS if isinstance(value, list) else ()
    others: list[Any] = []
    for other in found:
        if other != value and other not in others:
            others.append(other)
    return tuple(others)


def settings_of(variant: Variant) -> dict[str, Any]:
    """The configuration that is changed, as `create` of the oracle has it."""
    sizes = (
        dict(GPT2_SIZES)
        if variant.model_type == "gpt2"
        else {**SIZES, "pad_token_id": 6, **rope(5000.0)}
    )
    if any(name in variant.settings for name in OTHER_EPSILONS):
        del sizes["rms_norm_eps"]
    return {**sizes, **variant.settings}


def keys_of(family: str) -> dict[str, Any]:
    """All keys that transformers writes for the unchanged model, and their values."""
    variant = BASES[family]
    config = make_config(variant.model_type, **settings_of(variant))
    written: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return written


NOT_COMPUTED = (
    ("mamba2", "rescale_prenorm_residual", True),
    ("mpt", "max_seq_len", 1),
)
"""Changes for which transformers 5.23 is no oracle: it divides weights again that it has loaded, and gives all positions
the bias of one."""


def single_changes(family: str) -> Iterator[Changes]:
    for key, value in keys_of(family).items():
        for other in alternatives(key, value):
            if (family, key, other) not in NOT_COMPUTED:
                yield {key: other}


class Outcome(NamedTuple):
    kind: str
    """`same`, `refused`, `unknown` (transformers can't run it, and we do), or a fault: `differs`, `raises`."""
    what: str = ""

    @property
    def is_fault(self) -> bool:
        return self.kind in ("differs", "raises")


def judge(family: str, changes: Changes, directory: Path) -> Outcome:
    """The trainer's outcome for a model with these changes in its config.json, as if it came from Hugging Face."""
    expected = _expected(family, changes, directory)
    try:
        found = logits_of_the_trainer(directory)
    except CheckpointError as error:
        return Outcome("refused", str(error))
    except Exception as error:
        return Outcome("raises", f"{type(error).__name__}: {error}")
    if expected is None or not bool(expected[0].isfinite().all()):
        return Outcome("unknown")
    exact, rounded = expected
    largest = exact.abs().max() or 1.0  # norms of one element make all logits 0

    def stray(logits: torch.Tensor) -> float:
        return float((logits - exact).abs().max() / largest)

    strays, theirs = stray(found), stray(rounded)
    if strays > max(TOLERANCE, 2 * theirs):
        theirs = max(theirs, *map(stray, _rounded_otherwise(directory)))
    return Outcome(
        "same" if strays <= max(TOLERANCE, 2 * theirs) else "differs",
        f"{strays:.1e}, transformers {theirs:.1e}",
    )


def _expected(
    family: str, changes: Changes, directory: Path
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """transformers' logits, in float64 and in float32; None where it can't make or run the model. The files are in the directory then."""
    variant = BASES[family]
    settings = settings_of(variant)
    try:
        _save(variant.model_type, {**settings, **changes}, directory)
        made = True
    except Exception:
        _save(variant.model_type, settings, directory)
        made = False
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    try:
        return _logits(directory) if made else None
    except Exception:
        return None


def _save(model_type: str, settings: Mapping[str, Any], directory: Path) -> None:
    torch.manual_seed(20)
    # transformers changes the objects that it gets.
    config = make_config(model_type, **deepcopy(dict(settings)))
    found = model_class(config)
    model = found(config) if model_type == "mistral4" else found.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2)
        if model_type == "youtu" and config.pad_token_id is not None:
            # transformers 5.23 clears this row when it loads the class, whatever the file holds.
            model.get_input_embeddings().weight[config.pad_token_id] = 0.0
    model.save_pretrained(directory)


def _logits(directory: Path) -> tuple[torch.Tensor, torch.Tensor]:
    model = load(directory)
    model.config._experts_implementation = "eager"  # computes in float64 too
    with torch.no_grad():
        rounded = model(input_ids=TOKENS).logits
        usual = torch.get_default_dtype()
        if model.config.model_type == "xglm":
            torch.set_default_dtype(torch.float64)  # its mask is of the default dtype
        try:
            return model.double()(input_ids=TOKENS).logits, rounded
        finally:
            torch.set_default_dtype(usual)


def _rounded_otherwise(directory: Path) -> Iterator[torch.Tensor]:
    """transformers' logits in float32, of weights that differ by less than float32 can tell: all sums round otherwise."""
    for seed in range(DRAWS):
        model, generator = load(directory), torch.Generator().manual_seed(seed)
        model.config._experts_implementation = "eager"
        with torch.no_grad():
            for parameter in model.parameters():
                draw = 2 * torch.rand(parameter.shape, generator=generator) - 1
                parameter.mul_(1 + draw * 2**-24)
            yield model(input_ids=TOKENS).logits


def logits_of_the_trainer(directory: Path) -> torch.Tensor:
    """The trainer's logits for any checkpoint, in float32."""
    logging.getLogger("megaconv").setLevel(logging.ERROR)  # tests/conftest.py resets this level
    start = open_weights(str(directory))
    config = start.config
    layout = Layout(1, 1, 1, stage_layers=(config.layer_count,))
    options = ModelOptions(dtype="float32", trains=False)
    dp = check_sizes(
        config, layout, world=1, options=options, sequence=TOKENS.shape[1], microbatches=1
    )
    grid = make_grid(layout, dp, torch.device("cpu"), experts=config.experts.count > 0)
    engine = Engine(config, grid, options, None)
    load_weights(engine, {key.name: tensor for key, tensor in start.tensors.items()})
    found = engine.logits(Microbatch(TOKENS, TOKENS))
    assert found is not None
    return found

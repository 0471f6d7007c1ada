"""Against the real software: transformers and Megatron core compute the same logits from what we convert."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from safetensors.torch import save_file

import megaconv
from megaconv.errors import NotExpressible
from megaconv.families import families, family_of_hf
from megaconv.model.config import ModelConfig
from megaconv.model.described import value_of
from megaconv.model.fields import per_layer
from tests.conftest import FIXTURES
from tests.families.test_delta_nets import with_mtp
from tests.families.test_families import assert_same, weights_of, write_model
from tests.families.test_hybrid_mtp import MTP_OF_HYBRID
from tests.megatron_oracle import (
    Megatron,
    OracleFailed,
    for_this_release,
    installed_minor,
    read_rank_file,
)
from tests.transformers_oracle import (
    ALL_SLOW,
    LAYERS,
    LLAMA3,
    MIXTURES,
    NAMED,
    SIZES,
    UNTRAINED,
    VARIANTS,
    VOCAB,
    WINDOW,
    architecture,
    assert_same_bits,
    compute,
    create,
    family_of,
    load,
    meaning,
    rope,
    windows,
)

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

pytestmark = pytest.mark.oracle

TOLERANCE = 1e-4
"""Largest difference of two float32 logits that mean the same; sums are taken in different orders."""

SEQUENCE, DIVISOR = 24, 8

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2 pp2 vpp2": {"tp": 2, "pp": 2, "vpp": 2},
    "tp1 pp1": {"tp": 1, "pp": 1},
    "tp2 pp2, layers 1+3": {"tp": 2, "pp": 2, "layer_split": (1, 3)},
    "tp2 pp2": {"tp": 2, "pp": 2},
    "tp1 pp2 vpp2, layers 1+1+2+0": {"tp": 1, "pp": 2, "vpp": 2, "layer_split": (1, 1, 2, 0)},
    "tp1 pp4": {"tp": 1, "pp": 4},
    "tp4 pp1, release": {"tp": 4, "pp": 1, "release": True},
}
EXPERT_LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2 pp1 ep4 etp1": {"tp": 2, "pp": 1, "ep": 4, "etp": 1},
    "tp1 pp1 ep1": {"tp": 1, "pp": 1, "ep": 1},
    "tp1 pp2 ep2": {"tp": 1, "pp": 2, "ep": 2},
    "tp2 pp1 ep2": {"tp": 2, "pp": 1, "ep": 2},
}
ALL_VARIANTS = {**VARIANTS, **MIXTURES, **UNTRAINED}
ALL_LAYOUTS = {**LAYOUTS, **EXPERT_LAYOUTS}


def cases(at_once: int) -> list[Any]:
    """Every variant at each of its layouts; those beyond its quick ones, and beyond the first `at_once`, are slow.

    A Llama and a Mixtral have none that is slow.
    """
    found = []
    for name, variant in ALL_VARIANTS.items():
        layouts = tuple(variant.layouts or (EXPERT_LAYOUTS if name in MIXTURES else LAYOUTS))
        quick = layouts if name in ("llama", "mixtral") else (variant.quick or layouts)[:at_once]
        found += [
            pytest.param(name, each, marks=[] if each in quick else [pytest.mark.slow])
            for each in layouts
        ]
    return found


@dataclass(frozen=True)
class Reference:
    """A model as transformers saved it, and what transformers computes with it."""

    directory: Path
    tokens: "torch.Tensor"
    logits: "torch.Tensor"


References = Callable[[str], Reference]


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    """Each variant's reference, made once."""
    import torch

    @cache
    def reference(name: str) -> Reference:
        directory = tmp_path_factory.mktemp("reference") / "model"
        create({**ALL_VARIANTS, **NAMED}[name], directory)
        tokens = torch.randint(0, VOCAB, (2, SEQUENCE), generator=torch.Generator().manual_seed(4))
        return Reference(directory, tokens, compute(load(directory), tokens))

    return reference


def to_core(source: Path, target: Path, **options: Any) -> Path:
    """Convert to the names of Megatron's local layers, the only ones that run without a GPU."""
    release = for_this_release(options.get("ckpt_format", "torch"))
    others = options.pop("options", None) or {}
    if installed_minor() >= 19:  # its indexers have the order of transformers
        others = {name: value for name, value in others.items() if name != "indexer_for"}
    if others.get("model") == "hybrid":  # names of one release alone
        release = {}
    asked = {"options": {**release, **others}}
    megaconv.convert(
        source,
        target,
        saver="core",
        transformer_impl="local",
        make_vocab_size_divisible_by=DIVISOR,
        **asked,
        **options,
    )
    return target


def options(variant: str, layout: str) -> dict[str, Any]:
    return {**ALL_LAYOUTS[layout], "options": ALL_VARIANTS[variant].extra}


def assert_close(found: "torch.Tensor", expected: "torch.Tensor") -> None:
    assert (found - expected).abs().max().item() <= TOLERANCE
    assert found.argmax(-1).equal(expected.argmax(-1))


# Hugging Face to Megatron.


@pytest.mark.parametrize(
    ("variant", "other"),
    [(name, other) for name, variant in ALL_VARIANTS.items() for other in variant.others],
)
def test_each_setting_of_a_variant_changes_its_logits(
    variant: str, other: str, references: References
) -> None:
    reference = references(variant)
    logits = compute(
        load(reference.directory, **ALL_VARIANTS[variant].others[other]), reference.tokens
    )
    assert (logits - reference.logits).abs().max().item() > 100 * TOLERANCE


@pytest.mark.parametrize(("variant", "layout"), cases(at_once=1))
def test_megatron_computes_what_transformers_computes(
    variant: str, layout: str, references: References, megatron: Megatron, tmp_path: Path
) -> None:
    reference = references(variant)
    logits = megatron.logits(
        to_core(reference.directory, tmp_path / "core", **options(variant, layout)),
        reference.tokens,
    )
    assert_close(logits[..., :VOCAB], reference.logits)


AS_HYBRIDS = {
    "qwen3_next": ["tp2 pp1 ep2", "tp1 pp2 ep2"],
    "qwen3_5": ["tp2 pp2, layers 1+3"],
    "qwen3_5_moe": ["tp2 pp1 ep2"],
    "llama": ["tp2 pp2 vpp2"],
    "mixtral": ["tp1 pp1 ep1"],
}
"""Models as HybridModel, and their layouts."""


@pytest.mark.skipif(
    installed_minor() < 19, reason="HybridModel with gated delta nets is of core 0.19"
)
@pytest.mark.parametrize("ckpt_format", ["torch", "torch_dist"])
@pytest.mark.parametrize(
    ("variant", "layout"),
    [(name, layout) for name, layouts in AS_HYBRIDS.items() for layout in layouts],
)
def test_a_hybrid_model_of_megatron_computes_what_transformers_computes(
    variant: str,
    layout: str,
    ckpt_format: str,
    references: References,
    megatron: Megatron,
    tmp_path: Path,
) -> None:
    reference = references(variant)
    settings = {**options(variant, layout), "options": {"model": "hybrid"}}
    core = to_core(reference.directory, tmp_path / "core", ckpt_format=ckpt_format, **settings)
    assert_close(megatron.logits(core, reference.tokens)[..., :VOCAB], reference.logits)


def with_gentle_weights(hf: Path) -> Path:
    """Larger weights would make more of the last bits: half a unit of them moves such logits by 1e-4."""
    weights = {name: 0.3 * weight for name, weight in weights_of(hf).items()}
    save_file(weights, hf / "model.safetensors", metadata={"format": "pt"})
    return hf


@pytest.mark.skipif(
    installed_minor() < 19, reason="HybridModel with gated delta nets is of core 0.19"
)
@pytest.mark.parametrize("ckpt_format", ["torch", "torch_dist"])
def test_a_hybrid_model_loads_its_layers_for_multi_token_prediction(
    ckpt_format: str, megatron: Megatron, tmp_path: Path
) -> None:
    """Loading is strict. The logits come from the other layers."""
    import torch

    hf = with_gentle_weights(with_mtp(write_model(tmp_path / "hf", "qwen3_next")))
    tokens = torch.arange(24).reshape(2, 12) % 16
    megaconv.convert(hf, tmp_path / "fp32", saver="hf", dtype="fp32")
    settings: dict[str, Any] = {"pp": 2, "layer_split": (1, 2), "options": {"model": "hybrid"}}
    core = to_core(tmp_path / "fp32", tmp_path / "core", ckpt_format=ckpt_format, **settings)
    expected = compute(load(tmp_path / "fp32"), tokens)
    assert_close(megatron.logits(core, tokens)[..., : expected.shape[-1]], expected)


@pytest.mark.skipif(
    installed_minor() < 19, reason="hybrids with MTP layers are of core 0.17 and later"
)
@pytest.mark.parametrize("ckpt_format", ["torch", "torch_dist"])
def test_a_hybrid_with_mamba_layers_loads_its_layer_for_multi_token_prediction(
    ckpt_format: str, megatron: Megatron, tmp_path: Path
) -> None:
    """Loading is strict. The logits come from the other layers."""
    import torch

    hf = with_gentle_weights(
        write_model(tmp_path / "hf", "nemotron_h", **MTP_OF_HYBRID, moe_latent_size=8)
    )
    tokens = torch.arange(24).reshape(2, 12) % 16
    megaconv.convert(hf, tmp_path / "fp32", saver="hf", dtype="fp32")
    settings: dict[str, Any] = {"pp": 2, "layer_split": (2, 3), "ckpt_format": ckpt_format}
    core = to_core(tmp_path / "fp32", tmp_path / "core", tp=2, **settings)
    expected = compute(load(tmp_path / "fp32"), tokens)
    assert_close(megatron.logits(core, tokens)[..., : expected.shape[-1]], expected)


@pytest.mark.parametrize("name", ["qwen3_next", pytest.param("glm4_moe", marks=pytest.mark.slow)])
def test_local_layers_for_multi_token_prediction_have_megatrons_keys(
    name: str, megatron: Megatron, tmp_path: Path
) -> None:
    """Loading is strict. Only layers with experts spell the norm before them otherwise. The way back finds it too."""
    import torch

    model = write_model(tmp_path / "hf", name)
    model = with_mtp(model) if name == "qwen3_next" else model
    hf = tmp_path / "fp32"
    megaconv.convert(model, hf, saver="hf", dtype="fp32")
    core = to_core(hf, tmp_path / "core", ckpt_format="torch_dist")
    megatron.logits(core, torch.arange(24).reshape(2, 12) % 16)
    shutil.rmtree(core / "hf")
    megaconv.convert(core, tmp_path / "back", saver="hf", config=hf)
    assert_same(tmp_path / "back", hf)


DISTRIBUTED = [
    ("llama", "tp1 pp1"),
    ("llama", "tp2 pp2 vpp2"),
    ("llama", "tp2 pp2, layers 1+3"),
    ("gpt2", "tp2 pp2"),
    ("mixtral", "tp1 pp1 ep1"),
    ("mixtral", "tp2 pp1 ep4 etp1"),
    ("glm4_moe", "tp1 pp2 ep2"),
    ("gpt_oss", "tp2 pp1 ep2"),
    ("deepseek_v3", "tp1 pp2 ep2"),
    ("qwen3_next", "tp2 pp1 ep2"),
    ("gemma", "tp2 pp2"),
    ("qwen2, fewer kv heads than ranks", "tp4 pp1, release"),
    ("qwen3, fewer kv heads than ranks", "tp4 pp1, release"),
    *(
        (name, each.quick[0])
        for name, each in ALL_VARIANTS.items()
        if each.quick not in ((), ALL_SLOW)
    ),
    ("mistral4", "tp2 pp1 ep2"),
]


@pytest.mark.parametrize(("variant", "layout"), DISTRIBUTED)
def test_megatron_loads_torch_dist_strictly_and_computes_the_same(
    variant: str, layout: str, references: References, megatron: Megatron, tmp_path: Path
) -> None:
    """Every key of the model is in the checkpoint, and the other way round; Megatron itself cuts it for its ranks."""
    reference = references(variant)
    checkpoint = to_core(
        reference.directory, tmp_path / "dist", ckpt_format="torch_dist", **options(variant, layout)
    )
    assert_close(megatron.logits(checkpoint, reference.tokens)[..., :VOCAB], reference.logits)


def test_one_epsilon_is_all_that_tells_latent_attention_in_megatron_from_that_in_transformers(
    megatron: Megatron, tmp_path: Path
) -> None:
    """Moonlight and GLM-4.7-Flash have another epsilon than their latent norms, here one that shows."""
    import torch

    variant = MIXTURES["glm4_moe_lite"]
    create(replace(variant, settings={**variant.settings, "rms_norm_eps": 1e-3}), tmp_path / "hf")
    report = megaconv.convert(
        tmp_path / "hf", tmp_path / "core", saver="core", transformer_impl="local", tp=2, ep=2
    )
    assert any(
        "have epsilon 1e-06 in transformers and 0.001" in notice for notice in report.notices
    )
    model, tokens = load(tmp_path / "hf"), torch.arange(2 * SEQUENCE).reshape(2, SEQUENCE)
    found = megatron.logits(tmp_path / "core", tokens)[..., :VOCAB]
    assert (found - compute(model, tokens)).abs().max().item() > 10 * TOLERANCE
    for name, module in model.named_modules():
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
            assert module.variance_epsilon == 1e-6
            module.variance_epsilon = cast(Any, 1e-3)
    assert_close(found, compute(model, tokens))


# Megatron to Hugging Face.


@pytest.mark.parametrize(("variant", "layout"), cases(at_once=1))
def test_the_way_back_gives_the_same_model(
    variant: str, layout: str, references: References, tmp_path: Path
) -> None:
    import torch

    reference = references(variant)
    core = to_core(reference.directory, tmp_path / "core", **options(variant, layout))
    megaconv.convert(core, tmp_path / "hf", saver="hf")
    found, expected = load(tmp_path / "hf"), load(reference.directory)
    assert meaning(found.config) == meaning(expected.config)
    assert_same_bits(found, expected, torch.float32)
    assert compute(found, reference.tokens).equal(reference.logits)


@pytest.mark.parametrize("variant", NAMED)
def test_the_way_back_of_what_megatron_has_no_model_for_gives_the_same(
    variant: str, references: References, tmp_path: Path
) -> None:
    import torch

    reference = references(variant)
    for sizes in ({"tp": 2, "ep": 2}, {"pp": 2}):
        core = to_core(reference.directory, tmp_path / f"core-{len(sizes)}", **sizes)
        shutil.rmtree(core / "hf")
        megaconv.convert(core, tmp_path / f"hf-{len(sizes)}", saver="hf")
        found = load(tmp_path / f"hf-{len(sizes)}")
        assert_same_bits(found, load(reference.directory), torch.float32)
        assert compute(found, reference.tokens).equal(reference.logits)


RECOGNIZED = [
    name for name, variant in ALL_VARIANTS.items() if families()[family_of(variant)].recognized
]
"""The variants, without those whose args are another family's: the args of a Phi-3 are a Mistral's."""


@pytest.mark.parametrize("variant", RECOGNIZED)
def test_the_way_back_needs_nothing_but_the_rank_files(
    variant: str, references: References, tmp_path: Path
) -> None:
    """A checkpoint that Megatron trained has only args, and no config.json beside it."""
    import torch
    from transformers import AutoConfig

    reference = references(variant)
    ep = 2 if variant == "gpt_oss" else 1  # its experts have biases, and so aren't cut
    shutil.rmtree(to_core(reference.directory, tmp_path / "core", tp=2, pp=2, ep=ep) / "hf")
    megaconv.convert(tmp_path / "core", tmp_path / "hf", saver="hf")
    found, expected = load(tmp_path / "hf"), load(reference.directory)
    assert_same_bits(found, expected, torch.float32)
    assert compute(found, reference.tokens).equal(reference.logits)
    ours, theirs = (
        architecture(AutoConfig.from_pretrained(path))
        for path in (tmp_path / "hf", reference.directory)
    )
    if theirs["model_type"] == "mistral" and theirs["sliding_window"] is None:
        # A Mistral without a window is the same model as a Llama.
        same = {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "mlp_bias": False,
        }
        theirs |= same
    if theirs["model_type"] == "mamba2":
        # The model has neither attention nor an MLP, so their sizes have no meaning.
        theirs |= dict.fromkeys(("num_attention_heads", "num_key_value_heads", "intermediate_size"))
    assert ours == theirs


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("cast_by_us", [False, True], ids=["stored so", "cast on the way"])
def test_half_precision_keeps_its_bits(
    dtype: str, cast_by_us: bool, references: References, tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    directory, wanted = references("qwen3").directory, cast("torch.dtype", getattr(torch, dtype))
    rounded = AutoModelForCausalLM.from_pretrained(directory, dtype=wanted)
    rounded.save_pretrained(tmp_path / "rounded")
    source = (
        {"source": directory, "dtype": dtype} if cast_by_us else {"source": tmp_path / "rounded"}
    )
    core = to_core(target=tmp_path / "core", tp=2, pp=2, **source)
    args = read_rank_file(core / "release" / "mp_rank_01_001" / "model_optim_rng.pt")["args"]
    assert (args.params_dtype, args.bf16, args.fp16) == (
        wanted,
        dtype == "bfloat16",
        dtype == "float16",
    )
    megaconv.convert(core, tmp_path / "hf", saver="hf")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    assert found.config.dtype == wanted
    assert_same_bits(found, rounded, wanted)


# Checkpoints that Megatron wrote itself.

TRAINED = sorted(
    path.name
    for path in FIXTURES.glob("core-*")
    if not path.name.startswith(("core-bert", "core-t5"))
)
WITHOUT_HF_CLASS = {
    "core-qwenlike-tp2pp1": "Qwen3ForCausalLM",
    "core-moe-shared-tp2ep2": "Glm4MoeForCausalLM",
}
"""A mixture of Qwen 2 and 3, and a shared expert of a width that its class can't say; and the class that comes nearest."""
TRAINED_VOCAB = 100


def stored_logits(name: str) -> "tuple[torch.Tensor, torch.Tensor]":
    """(tokens, logits that Megatron computed in float32 when it wrote the checkpoint)."""
    from safetensors.torch import load_file

    stored = load_file(FIXTURES / name / "logits.safetensors")
    return stored["input_ids"], stored["logits"][..., :TRAINED_VOCAB]


@pytest.mark.parametrize("name", [name for name in TRAINED if name not in WITHOUT_HF_CLASS])
def test_transformers_computes_what_megatron_computed(name: str, tmp_path: Path) -> None:
    megaconv.convert(FIXTURES / name / "checkpoint", tmp_path / "hf", saver="hf")
    tokens, expected = stored_logits(name)
    model = load(tmp_path / "hf")
    assert model.config.vocab_size == TRAINED_VOCAB
    assert_close(compute(model, tokens), expected)


@pytest.mark.parametrize(("name", "nearest"), WITHOUT_HF_CLASS.items())
def test_a_model_without_a_class_in_transformers_is_refused(
    name: str, nearest: str, tmp_path: Path
) -> None:
    with pytest.raises(NotExpressible, match=nearest):
        megaconv.convert(FIXTURES / name / "checkpoint", tmp_path / "hf", saver="hf")
    assert not (tmp_path / "hf").exists()


ONE_LAYER = "core-te-mixtral-optim-ep2"


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        (name, layout)
        for name in TRAINED
        for layout in ("tp1 pp1", "tp2 pp2")
        if (name, layout) != (ONE_LAYER, "tp2 pp2")
    ],
)
def test_a_checkpoint_of_megatron_computes_the_same_at_another_layout(
    name: str, layout: str, megatron: Megatron, tmp_path: Path
) -> None:
    tokens, expected = stored_logits(name)
    # Without the optimizer, whose fp32 masters would be what an fp32 output has for weights.
    options = {"dtype": "float32", "ep": 1, "optimizer": False, **LAYOUTS[layout]}
    core = to_core(FIXTURES / name / "checkpoint", tmp_path / "core", **options)
    assert_close(megatron.logits(core, tokens)[..., :TRAINED_VOCAB], expected)


DIST_TRAINED = {
    "dist-llama-tp2pp2": ({"tp": 1, "pp": 1}, {"tp": 2, "pp": 2}),
    "dist-gpt2-tp2pp2": ({"tp": 1, "pp": 2},),
    "dist-mixtral-tp2ep2": ({"tp": 1, "pp": 1, "ep": 2}, {"tp": 2, "pp": 2, "ep": 1}),
}


@pytest.mark.parametrize(
    ("name", "sizes"),
    [(name, sizes) for name, layouts in DIST_TRAINED.items() for sizes in layouts],
    ids=str,
)
def test_a_distributed_checkpoint_of_megatron_computes_the_same_from_ours(
    name: str, sizes: dict[str, int], megatron: Megatron, tmp_path: Path
) -> None:
    """Read from its torch_dist, written as ours, loaded strictly by Megatron at another layout."""
    from safetensors.torch import load_file

    stored = load_file(FIXTURES / name / "logits.safetensors")
    expected = stored["logits"]
    ours = to_core(FIXTURES / name, tmp_path / "dist", ckpt_format="torch_dist", **sizes)
    assert_close(megatron.logits(ours, stored["input_ids"])[..., : expected.shape[-1]], expected)


# config.json in two versions.


@dataclass(frozen=True)
class BothVersions:
    """One model's config.json as transformers 4 writes it, and as transformers 5 does; common: what both say alike."""

    model_type: str
    common: Mapping[str, Any]
    old: Mapping[str, Any]
    new: Mapping[str, Any]

    def files(self) -> tuple[dict[str, Any], dict[str, Any]]:
        named = {
            "architectures": [f"{self.model_type.capitalize()}ForCausalLM"],
            "model_type": self.model_type,
        }
        common = {
            **named,
            **SIZES,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            **self.common,
        }
        return {**common, "torch_dtype": "bfloat16", **self.old}, {
            **common,
            "dtype": "bfloat16",
            **self.new,
        }


BOTH_VERSIONS = {
    "llama 2": BothVersions(
        "llama", {}, {"rope_scaling": None, "rope_theta": 5000.0}, rope(5000.0)
    ),
    "llama 3": BothVersions(
        "llama",
        {"head_dim": 8, "attention_bias": False},
        {"rope_scaling": LLAMA3, "rope_theta": 500000.0},
        rope(500000.0, **LLAMA3),
    ),
    "llama, linear": BothVersions(
        "llama",
        {"attention_bias": True, "mlp_bias": True},
        {"rope_scaling": {"type": "linear", "factor": 2.5}, "rope_theta": 5000},
        rope(5000.0, rope_type="linear", factor=2.5),
    ),
    "llama, without a word on positions": BothVersions("llama", {}, {}, rope(10000.0)),
    "mistral": BothVersions(
        "mistral", {"sliding_window": WINDOW}, {"rope_theta": 5e3}, {"head_dim": 8, **rope(5e3)}
    ),
    "mistral, no window": BothVersions(
        "mistral", {"sliding_window": None, "head_dim": 12}, {"rope_theta": 1e6}, rope(1e6)
    ),
    "qwen 2": BothVersions(
        "qwen2",
        {"use_sliding_window": False, "max_window_layers": 3},
        {"rope_theta": 1e6, "sliding_window": 4096},
        {"sliding_window": None, **windows(LAYERS), **rope(1e6)},
    ),
    "qwen 2, windows": BothVersions(
        "qwen2",
        {"use_sliding_window": True, "max_window_layers": 3, "sliding_window": WINDOW},
        {"rope_theta": 1e6},
        {**windows(3), **rope(1e6)},
    ),
    "qwen 3": BothVersions(
        "qwen3",
        {
            "head_dim": 12,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "sliding_window": None,
        },
        {"rope_scaling": None, "rope_theta": 1000000},
        {**windows(LAYERS), **rope(1e6)},
    ),
}


def read(raw: Mapping[str, Any]) -> ModelConfig:
    return family_of_hf(raw, "config.json").read_hf(raw)


def transformers_reads(raw: Mapping[str, Any], directory: Path) -> "PretrainedConfig":
    from transformers import AutoConfig

    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(raw))
    return cast("PretrainedConfig", AutoConfig.from_pretrained(directory))


def in_our_words(config: "PretrainedConfig") -> dict[str, Any]:
    """The configuration that transformers read, as fields of ModelConfig."""
    said = architecture(config)
    scaling = dict(said["rope_parameters"])
    scaling.pop("type", None)  # the older word for rope_type, which transformers leaves in place
    theta = scaling.pop("rope_theta")
    layers = (
        said["layer_types"]
        or ["sliding_attention" if said["sliding_window"] else "full_attention"]
        * said["num_hidden_layers"]
    )
    windowed = tuple(layer for layer, kind in enumerate(layers) if kind == "sliding_attention")
    return {
        "layers.count": said["num_hidden_layers"],
        "hidden": said["hidden_size"],
        "attention.heads": said["num_attention_heads"],
        "attention.kv_heads": said["num_key_value_heads"],
        "attention.head_dim": said["head_dim"],
        "mlp.ffn": said["intermediate_size"],
        "vocab": said["vocab_size"],
        "max_positions": said["max_position_embeddings"],
        "norm.epsilon": said["rms_norm_eps"],
        "positions.theta": theta,
        "positions.scaling": None if scaling["rope_type"] == "default" else scaling,
        "tie_embeddings": said["tie_word_embeddings"],
        "layers.window": per_layer(windowed, len(layers), said["sliding_window"], None),
    }


def assert_same_meaning(raw: Mapping[str, Any], directory: Path) -> None:
    found, expected = read(raw), in_our_words(transformers_reads(raw, directory))
    assert {name: value_of(found, name) for name in expected} == expected


@pytest.mark.parametrize("name", BOTH_VERSIONS)
def test_both_versions_of_config_json_mean_the_same(name: str, tmp_path: Path) -> None:
    old, new = BOTH_VERSIONS[name].files()
    assert read(old) == read(new)
    assert_same_meaning(old, tmp_path / "old")
    assert_same_meaning(new, tmp_path / "new")


NULLS = {"num_key_value_heads": None, "rope_scaling": None}
UNSAID = [
    *((kind, {}) for kind in ("llama", "mistral", "qwen2", "qwen3")),
    *((kind, NULLS) for kind in ("llama", "qwen2", "qwen3")),
]
"""Mistral's class takes no null for num_key_value_heads."""


@pytest.mark.parametrize(
    ("kind", "unsaid"),
    UNSAID,
    ids=[f"{kind}, {'null' if nulls else 'left out'}" for kind, nulls in UNSAID],
)
def test_missing_keys_of_config_json_mean_the_same_as_in_transformers(
    kind: str, unsaid: Mapping[str, Any], tmp_path: Path
) -> None:
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 88,
        "num_hidden_layers": 2,
        "num_attention_heads": 64,
        "vocab_size": VOCAB,
    }
    named = {"architectures": [f"{kind.capitalize()}ForCausalLM"], "model_type": kind}
    assert_same_meaning({**named, **sizes, **unsaid}, tmp_path / "model")


# The oracle's own test, last because Megatron has to start again after it.


def test_megatron_rejects_a_checkpoint_with_another_name(
    references: References, megatron: Megatron, tmp_path: Path
) -> None:
    import torch

    core = to_core(references("llama").directory, tmp_path / "core", tp=1, pp=1)
    file = core / "release" / "mp_rank_00" / "model_optim_rng.pt"
    state = read_rank_file(file)
    state["model"]["decoder.final_norm.weight"] = state["model"].pop(
        "decoder.final_layernorm.weight"
    )
    torch.save(state, file)
    with pytest.raises(OracleFailed, match=r"Missing key.*decoder\.final_layernorm\.weight"):
        megatron.logits(core, references("llama").tokens)

"""The model's parameters are the family table's: names and shapes of every rank, at every layout."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megaconv.errors import LayoutError, NotExpressible
from megaconv.families import families
from megaconv.families.parts.unsupported import UNSUPPORTED
from megaconv.megatron.arguments.write import to_arguments
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed
from megaconv.model.layout import LayerSplit, Layout, padded_vocab, split_layers
from megaconv.model.naming import CORE
from megaconv.model.natives import native_tensors
from megaconv.model.training import TrainingState
from megatron_lite.commands.models import main, table
from megatron_lite.models.build_plan import make_plan
from megatron_lite.models.chunk import ModelChunk
from megatron_lite.models.network_by_family import NETWORKS
from megatron_lite.models.rotary import Rotary
from megatron_lite.models.trainable import CONVERTED_ONLY, NOT_COMPUTED, RETRO, TRAINED
from megatron_lite.parallel.grid import Grid, make_grid
from megatron_lite.parallel.parameter_kinds import declared
from megatron_lite.parallel.parameters import parameter_infos
from megatron_lite.parallel.tensor import TensorGroup
from megatron_lite.settings.architecture import OF_THEIR_OWN
from megatron_lite.settings.options import LoRA, ModelOptions
from megatron_lite.settings.sizes import check_sizes
from tests.strategies import OTHER_LAYERS, has_experts, has_latent_attention, own_fields
from tests.trainer.parallel.small import MODELS
from tests.transformers_oracle import (
    BEYOND_MEGATRON,
    MIXTURES,
    NAMED,
    RELATIVES,
    VARIANTS,
    family_of,
)

ROOT = Path(__file__).parents[3]

EXPERTS = {"layers.mlp": "experts", "experts.count": 4, "experts.per_token": 2, "experts.ffn": 16}
LATENT = {
    "attention.qk_norm": False, "attention.kv_heads": 4, "latent.kv_rank": 10, "latent.q_rank": 6, "latent.rope_dim": 4, "latent.v_dim": 6,
    "experts.shared_ffn": 24, "layers.mlp": ("dense", "experts", "experts", "experts"),
}  # fmt: skip
LATENT_SIZES = {
    name: value for name, value in LATENT.items() if name.startswith(("attention", "latent"))
}
MIXED = {
    "attention.qk_norm": False, "layers.mixer": ("mamba", "attention", "mamba", "attention"), "mamba.heads": 4, "mamba.head_dim": 6,
    "mamba.groups": 2, "mamba.state": 5,
}  # fmt: skip
GEMMA_4 = {
    "layers.window": (8, None) * 2,
    "positions.local_theta": 700.0,
    "layers.head_dim": (None, 12) * 2,
    "layers.kv_heads": (None, 4) * 2,
    "layers.keys_as_values": (False, True) * 2,
    "attention.qk_norm": True,
    "attention.v_norm": True,
    "norm.place": "both",
    "layer_scale": True,
}
FEATURES = {
    "gpt2": MODELS["gpt2"],
    "llama": MODELS["llama"],
    "mistral": changed(replace(MODELS["qwen3"], family="mistral"), {"attention.qk_norm": False, "layers.window": 5}),
    "phi3": changed(replace(MODELS["qwen3"], family="phi3"), {"attention.qk_norm": False, "layers.window": 5}),
    **{
        name: changed(replace(MODELS["qwen3"], family=name), {"attention.qk_norm": False, **fields})
        for name, fields in (
            ("ministral", {"layers.window": (5, None, 5, None)}),
            ("cwm", {"layers.window": (None, 5, 5, 5)}),
            ("granite", {"residual_scale": 0.3, "head.divisor": 3.0, "embedding_scale": 12.0, "attention.scale": 0.1}),
            ("ministral3", {"temperature.scale": 0.3, "temperature.interval": 4, "temperature.everywhere": True}),
            ("helium", {"positions.interleaved": True}),
            ("exaone", {"attention.qkv_bias": True, "attention.o_bias": True}),
            ("internlm2", {"attention.qkv_bias": True, "attention.o_bias": True}),
            ("internlm3", dict.fromkeys(("attention.qkv_bias", "attention.o_bias", "mlp.bias"), True)),
            ("iquestcoder", {}),
            ("hyperclovax", {"residual_scale": 0.3, "head.divisor": 3.0, "embedding_scale": 12.0, "norm.place": "both"}),
            ("qwen", {"attention.qkv_bias": True}),
            ("youtu", {name: LATENT[name] for name in LATENT if name.startswith(("attention", "latent"))}),
        )
    },
    "mellum": changed(
        replace(MODELS["qwen3"], family="mellum"),
        {**EXPERTS, "layers.window": (5, 5, None, 5), "positions.local_theta": 100.0},
    ),
    "vaultgemma": changed(replace(MODELS["gemma2"], family="vaultgemma"), {"norm.place": "before"}),
    "qwen2": changed(
        replace(MODELS["qwen3"], family="qwen2"), {"attention.qk_norm": False, "attention.qkv_bias": True}
    ),
    "mimo": changed(
        replace(MODELS["qwen3"], family="mimo"),
        {"attention.qk_norm": False, "attention.qkv_bias": True},
    ),
    "laguna": MODELS["laguna"],
    "lfm3": MODELS["lfm3"],
    "step3p5": MODELS["step3p5"],
    "mimo_v2_flash": MODELS["mimo_v2_flash"],
    "nemotron_nas": MODELS["nemotron_nas"],
    "qwen3": MODELS["qwen3"],
    "mixtral": changed(replace(MODELS["qwen3"], family="mixtral"), {"attention.qk_norm": False, **EXPERTS}),
    "qwen2_moe": changed(
        replace(MODELS["qwen3"], family="qwen2_moe"),
        {
            "attention.qk_norm": False,
            "attention.qkv_bias": True,
            "experts.shared_ffn": 24,
            "experts.shared_gate": True,
            **EXPERTS,
        },
    ),
    "qwen3_moe": changed(replace(MODELS["qwen3"], family="qwen3_moe"), EXPERTS),
    "arcee": changed(replace(MODELS["llama"], family="arcee"), {"mlp.gated": False, "mlp.activation": "relu2"}),
    "jais2": changed(
        replace(MODELS["gpt2, untied"], family="jais2"), {"positions.kind": "rope", "mlp.activation": "relu2"}
    ),
    "nemotron": changed(
        replace(MODELS["gpt2, untied"], family="nemotron"),
        {"positions.kind": "rope", "mlp.activation": "relu2", "norm.zero_centered": True},
    ),
    "gemma": changed(
        replace(MODELS["llama"], family="gemma"),
        {"mlp.activation": "gelu_tanh", "norm.zero_centered": True, "embedding_scale": 32**0.5},
    ),
    "gemma2": MODELS["gemma2"],
    "gemma3_text": MODELS["gemma3"],
    "llama4": MODELS["llama4"],
    "deepseek_v32": MODELS["deepseek_v32"],
    "glm_moe_dsa": changed(replace(MODELS["deepseek_v32"], family="glm_moe_dsa"), {"indexer.interleaved": True}),
    "ernie4_5": changed(replace(MODELS["qwen3"], family="ernie4_5"), {"attention.qk_norm": False, "positions.interleaved": True}),
    "glm": changed(
        replace(MODELS["qwen3"], family="glm"),
        {"attention.qk_norm": False, "positions.interleaved": True, "positions.rotary_percent": 0.5},
    ),
    **{
        name: changed(replace(MODELS["qwen3"], family=name), {**EXPERTS, **LATENT, **fields})
        for name, fields in (
            ("deepseek_v2", {"latent.q_rank": 0, "experts.renormalize": False}),
            ("deepseek_v3", {"experts.score": "sigmoid", "experts.router_bias": True}),
            ("glm4_moe_lite", {"experts.score": "sigmoid", "experts.router_bias": True}),
            ("sarvam_mla", {"latent.q_rank": 0, "experts.score": "sigmoid", "experts.router_bias": True}),
        )
    },
    "smollm3": changed(
        replace(MODELS["qwen3"], family="smollm3"),
        {"attention.qk_norm": False, "layers.rotates": (True, True, True, False)},
    ),
    "gpt_oss": changed(
        replace(MODELS["llama"], family="gpt_oss"),
        {
            **EXPERTS, "tie_embeddings": False, "mlp.activation": "quick_gelu", "mlp.offset": 1.0, "mlp.clamp": 7.0,
            "attention.sinks": True, "layers.window": (5, None, 5, None),
        },
    ),
    "seed_oss": changed(replace(MODELS["qwen3"], family="seed_oss"), {"attention.qk_norm": False, "attention.qkv_bias": True}),
    "gpt_neox": changed(
        replace(MODELS["gpt2"], family="gpt_neox"), {"positions.kind": "rope", "parallel_residual": True, "tie_embeddings": False}
    ),
    "starcoder2": changed(replace(MODELS["gpt2, untied"], family="starcoder2"), {"positions.kind": "rope", "layers.window": 5}),
    "stablelm": changed(replace(MODELS["qwen3"], family="stablelm"), {"attention.qk_norm": False, "norm.kind": "LayerNorm"}),
    **{
        name: changed(
            replace(MODELS["qwen3"], family=name),
            {
                **EXPERTS, "layers.mlp": ("dense", "dense", "experts", "experts"), "experts.score": "sigmoid",
                "experts.router_bias": True, "experts.shared_ffn": 24,
            },
        )
        for name in ("bailing_moe2", "dots1", "exaone_moe", "glm4_moe", "hy_v3", "sarvam_moe")
    },
    "glm4": changed(
        replace(MODELS["qwen3"], family="glm4"),
        {"attention.qk_norm": False, "positions.interleaved": True, "positions.rotary_percent": 0.5, "norm.place": "both"},
    ),
    "exaone4": changed(
        replace(MODELS["qwen3"], family="exaone4"),
        {"norm.place": "after", "layers.window": (5, 5, 5, None), "layers.rotates": (True, True, True, False)},
    ),
    **{
        name: changed(replace(MODELS["olmo2"], family=name), {"layers.window": window})
        for name, window in (("olmo2", None), ("olmo3", (5, 5, 5, None)))
    },
    "olmoe": changed(replace(MODELS["qwen3"], family="olmoe"), {"attention.qk_norm_width": "all", **EXPERTS}),
    "minimax_m2": changed(
        replace(MODELS["qwen3"], family="minimax_m2"),
        {"attention.qk_norm_width": "all", **EXPERTS, "experts.score": "sigmoid", "experts.router_bias": True},
    ),
    "ernie4_5_moe": changed(
        replace(MODELS["qwen3"], family="ernie4_5_moe"),
        {
            **EXPERTS, "attention.qk_norm": False, "positions.interleaved": True, "experts.router_bias": True,
            "experts.shared_ffn": 24, "layers.mlp": ("dense", "experts", "experts", "experts"),
        },
    ),
    **{
        name: changed(
            replace(MODELS["qwen3"], family=name),
            {
                "attention.qk_norm": False,
                **(EXPERTS if has_experts(name) else {}),
                **(LATENT_SIZES if has_latent_attention(name) else {}),
                **own_fields(name),
            },
        )
        for name in OTHER_LAYERS
    },
    "bamba": changed(
        replace(MODELS["qwen3"], family="bamba"),
        {**MIXED, "layers.mixer": ("mamba", "none", "attention", "none"), "layers.mlp": ("none", "dense") * 2},
    ),
    "granite_moe_hybrid": changed(
        replace(MODELS["qwen3"], family="granite_moe_hybrid"), {**MIXED, **EXPERTS, "experts.shared_ffn": 24}
    ),
    "apertus": MODELS["apertus"],
    "gemma4_text": changed(
        replace(MODELS["qwen3"], family="gemma4_text"),
        {**GEMMA_4, **EXPERTS, "experts.shared_ffn": 24, "experts.own_norms": True},
    ),
    "gemma4_unified_text": changed(
        replace(MODELS["qwen3"], family="gemma4_unified_text"),
        {**GEMMA_4, "layers.shares_kv": (False, False, True, True)},
    ),
    "lfm2": changed(
        replace(MODELS["qwen3"], family="lfm2"), {"convolution.width": 3, "layers.mixer": ("convolution", "attention") * 2}
    ),
    "kimi_linear": MODELS["kimi"],
    "falcon_h1": changed(MODELS["falcon h1"], {"mamba.norm": "before_gate"}),
    "olmo_hybrid": changed(
        replace(MODELS["delta nets"], family="olmo_hybrid"),
        {**own_fields("olmo_hybrid"), "attention.output_gate": False, "norm.zero_centered": False},
    ),
    "lara_mini": changed(
        replace(MODELS["delta nets, experts"], family="lara_mini"),
        {**own_fields("lara_mini"), "attention.output_gate": False, "norm.zero_centered": False, "experts.shared_gate": False,
         "experts.renormalize": True, "mtp_layers": 0},
    ),
    "lfm2_moe": changed(
        replace(MODELS["qwen3"], family="lfm2_moe"),
        {**EXPERTS, "convolution.width": 3, "layers.mixer": ("convolution", "attention") * 2, "layers.mlp": ("dense",) + ("experts",) * 3},
    ),
    "modernbert_decoder": changed(
        replace(MODELS["qwen3"], family="modernbert_decoder"),
        {**own_fields("modernbert_decoder"), "attention.kv_heads": 4, "attention.qk_norm": False, "norm.bias": False,
         "layers.window": (None, 5, 5, None), "positions.local_theta": 700.0, "head.projection": "gelu", "head.bias": True},
    ),
    "mamba2": MODELS["mamba"],
    "nemotron_h": MODELS["hybrid"],
    "qwen3_5": MODELS["delta nets"],
    **{
        name: changed(replace(MODELS["delta nets, experts"], family=name), {"mtp_layers": 0})
        for name in ("qwen3_next", "qwen3_5_moe")
    },
    "solar_open": changed(
        replace(MODELS["qwen3"], family="solar_open"),
        {**EXPERTS, "attention.qk_norm": False, "experts.score": "sigmoid", "experts.router_bias": True, "experts.shared_ffn": 24},
    ),
}  # fmt: skip
COMPARED = tuple(FEATURES)
WITH_ALL_KV_HEADS = ("gpt2", "openai_gpt")
"""Families whose files hold q, k and v as one matrix of three equal parts."""
LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 2, 2), (2, 2, 1), (2, 4, 1)]


def config_of(family: str, *, tied: bool) -> ModelConfig:
    model = FEATURES[family]
    kv_heads = model.attention.kv_heads if model.has("mla") else 2
    if model.has("differential"):
        kv_heads = 4  # two tensor ranks have a pair each
    if family in WITH_ALL_KV_HEADS:
        kv_heads = model.attention.heads
    return changed(model, {"tie_embeddings": tied, "attention.kv_heads": kv_heads})


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", COMPARED)
def test_parameters_are_named_and_cut_as_the_table_says(family: str, tied: bool) -> None:
    config = config_of(family, tied=tied)
    for tp, pp, vpp in LAYOUTS:
        layout = Layout(
            tp, pp, vpp, stage_layers=split_layers(config.layer_count, pp, vpp, LayerSplit())
        )
        options = ModelOptions(vocab_divisor=8)
        for chunk in layout.chunks():
            for tp_rank in range(tp):
                for ep in (1, 2) if config.experts.count else (1,):
                    shared_out = replace(layout, ep=ep)
                    plan = make_plan(
                        config, shared_out, options, TensorGroup(None, tp_rank, tp, True)
                    )
                    with torch.device("meta"):
                        found = {
                            name: tuple(p.shape)
                            for name, p in ModelChunk(plan, chunk).named_parameters()
                        }
                    padded = padded_vocab(config.vocab, 8, tp)
                    natives = native_tensors(
                        families()[family].rows, config, CORE, shared_out, tp_rank, chunk, padded
                    )
                    expected = {
                        n.name: n.shape for n in natives if n.copy is None or n.copy.written
                    }
                    assert found == expected


def test_every_family_that_can_be_trained_is_compared() -> None:
    """Its parameters here, its logits and gradients with transformers'."""
    assert set(TRAINED) == set(COMPARED) <= set(families())
    assert set(NETWORKS) == {*OF_THEIR_OWN, RETRO}
    oracles = {
        family_of(variant) for variant in (VARIANTS | MIXTURES | NAMED | BEYOND_MEGATRON).values()
    }
    assert set(TRAINED) <= oracles | set(RELATIVES)
    assert oracles.isdisjoint(RELATIVES)


@pytest.mark.parametrize("family", COMPARED)
def test_a_run_of_every_family_can_be_saved(family: str) -> None:
    """Megatron's arguments can't describe some of the models. A config.json beside the checkpoint does."""
    config = FEATURES[family]
    arguments = to_arguments(
        config, Layout(stage_layers=(config.layer_count,)), TrainingState(), transformer_impl="transformer_engine",
        grouped_experts=False, vocab_divisor=1, padded_vocab=config.vocab, beside_config=True,
    )  # fmt: skip
    assert arguments["num_layers"] == config.layer_count


def test_every_family_can_be_trained_or_is_named_with_its_reason() -> None:
    assert set(families()) == set(TRAINED) | set(NETWORKS) | set(CONVERTED_ONLY)
    assert set(CONVERTED_ONLY).isdisjoint((*TRAINED, *NETWORKS))


@pytest.mark.parametrize("name", CONVERTED_ONLY)
def test_a_family_that_is_only_converted_is_refused_with_its_reason(name: str) -> None:
    model = replace(MODELS["qwen3"], family=name)
    with pytest.raises(NotExpressible, match=f"a {name} is converted, but can't be trained yet"):
        make_plan(model, Layout(stage_layers=(4,)), ModelOptions(), TensorGroup())


def test_the_documentation_lists_what_can_be_trained() -> None:
    found, listed = (
        (text.splitlines())
        for text in (table(), (ROOT / "docs" / "trainer-models.md").read_text("utf-8"))
    )
    trained = [line.removesuffix(" yes |") for line in found if line.endswith("| yes |")]
    assert len(trained) == len(TRAINED) + len(NETWORKS)
    assert [line for line in listed if line.startswith("| ")] == [
        "| family | architectures |",
        *trained,
    ]


def test_models_lists_the_reason_of_everything_that_can_not_be_trained(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out.splitlines()
    untrained = [line.split()[1] for line in printed if line.endswith("| no |")]
    assert untrained == sorted(CONVERTED_ONLY), "a family that can't be trained needs a reason"
    listed = [line for line in printed if line.startswith("- ")]
    for name, parts in CONVERTED_ONLY.items():
        assert f"- {name}: {parts}" in listed
    for part in NOT_COMPUTED.values():
        assert f"- a model with {part}" in listed
    assert main(["--json"]) == 0
    for_programs = json.loads(capsys.readouterr().out)
    families = for_programs["families"]
    assert [each["name"] for each in families if not each["trained"]] == untrained
    assert for_programs["converted_only"] == CONVERTED_ONLY
    assert for_programs["not_trained"] == list(NOT_COMPUTED.values())
    for architecture, reason in UNSUPPORTED.items():
        named = [line for line in listed if line.endswith(f": {reason}")]
        assert len(named) == 1
        assert architecture in named[0].partition(": ")[0].removeprefix("- ").split(", ")


def test_a_family_of_another_package_is_not_trained_as_if_it_were_one_of_these() -> None:
    model = replace(MODELS["qwen3"], family="tiny_moe")
    with pytest.raises(NotExpressible, match="a tiny_moe can't be trained; "):
        make_plan(model, Layout(stage_layers=(4,)), ModelOptions(), TensorGroup())


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        (
            {"attention.score_cap": 50.0, "attention.sinks": True},
            "capped scores beside attention sinks",
        ),
        (
            {"norm.place": "after_sum", "head.classes": 2},
            "norms after the residual sums, as the original BERT",
        ),
        ({"attention.v_dim": 20}, "values that are wider than keys"),
        ({"attention.head_gate": True}, "gates of whole heads beside biases of q, k and v"),
        (
            {
                "layers.mixer": ("none",) + ("attention",) * 3,
                "layers.mlp": ("none",) + ("dense",) * 3,
            },
            "layers with neither a mixer nor an MLP",
        ),
    ],
)
def test_features_that_the_decoder_does_not_compute_are_refused_by_name(
    fields: dict[str, Any], what: str
) -> None:
    model = changed(MODELS["llama"], {"layers.count": 4, **fields})
    with pytest.raises(
        NotExpressible, match=f"the model has {what}, which megatron_lite can't compute yet"
    ):
        make_plan(model, Layout(stage_layers=(4,)), ModelOptions(), TensorGroup())


def test_a_parameter_is_a_share_exactly_where_its_activations_are() -> None:
    """Norms of q and k see their rank's heads alone; under sequence parallelism norms see their rank's tokens alone."""
    config, layout = MODELS["qwen3"], Layout(2, 1, 1, stage_layers=(4,))
    grid = Grid(layout, 1, 1, torch.device("cpu"))
    (chunk,) = layout.chunks()
    for sequence in (False, True):
        ranks = TensorGroup(None, 1, 2, sequence)
        module = ModelChunk(make_plan(config, layout, ModelOptions(), ranks), chunk)
        infos = list(
            parameter_infos(declared(module), config, grid, 0, chunk, 256, sequence=sequence)
        )
        partial = {
            info.name.rpartition(".layers.3.")[2]
            for info in infos
            if info.partial and ".layers.3." in info.name
        }
        heads = {"self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"}
        norms = {"self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"}
        assert partial == (heads | norms if sequence else heads)


REFUSED = [
    ({"world": 6}, {"tp": 2, "pp": 2}, "6 processes can't be divided over tp x pp = 2 x 2 = 4"),
    ({"world": 8}, {"tp": 8}, "heads = 4 can't be divided over tensor parallel size"),
    ({"world": 4}, {"tp": 4}, "kv_heads = 2 can't be divided"),
    ({"world": 2, "sequence": 15}, {"tp": 2}, "shards 15 tokens over tp = 2"),
    ({"world": 2, "microbatches": 5}, {"pp": 2, "vpp": 2}, "5 microbatches are not a multiple of 2 pipeline stages; use 4 or 6"),
    ({"world": 2, "microbatches": 1}, {"pp": 2, "vpp": 2}, "use 2"),
    ({"world": 2}, {"pp": 2, "stage_layers": (2, 1)}, "stages of 2+1 layers don't make 4 layers"),
]  # fmt: skip


@pytest.mark.parametrize(("run", "sizes", "said"), REFUSED, ids=lambda value: str(value)[:40])
def test_sizes_that_can_not_be_are_refused_with_the_arithmetic(
    run: dict[str, int], sizes: dict[str, int], said: str
) -> None:
    pp, vpp = sizes.get("pp", 1), sizes.get("vpp", 1)
    layout = Layout(**{"stage_layers": (4 // pp // vpp,) * (pp * vpp), **sizes})  # type: ignore[arg-type]
    arguments = {"world": 1, "sequence": 16, "microbatches": 4, **run}
    with pytest.raises(LayoutError, match=said.replace("+", r"\+")):
        check_sizes(
            MODELS["qwen3"], layout, options=ModelOptions(sequence_parallel=True), **arguments
        )


def test_a_sequence_longer_than_learned_positions_is_refused() -> None:
    with pytest.raises(LayoutError, match="33 tokens is longer than the model's 32 positions"):
        check_sizes(
            MODELS["gpt2"],
            Layout(stage_layers=(4,)),
            world=1,
            options=ModelOptions(),
            sequence=33,
            microbatches=1,
        )


def test_a_grid_of_another_size_than_the_world_is_refused() -> None:
    with pytest.raises(LayoutError, match="= 2, but there is 1 process"):
        make_grid(Layout(2, 1, 1, stage_layers=(4,)), 1, torch.device("cpu"))


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(2, 1, 1, stage_layers=(4,)), "at tp = 2 needs --sequence-parallel"),
        (Layout(1, 1, 1, 3, stage_layers=(4,)), "experts = 4"),
    ],
)
def test_layouts_that_experts_can_not_have_are_refused(layout: Layout, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        make_plan(FEATURES["mixtral"], layout, ModelOptions(), TensorGroup(None, 0, layout.tp))


def test_experts_that_have_biases_or_adapters_are_not_cut() -> None:
    cut, adapters = Layout(etp=2, stage_layers=(4,)), ModelOptions(lora=LoRA(4, 8.0))
    with pytest.raises(LayoutError, match="experts with biases can't be sharded"):
        make_plan(MODELS["gpt_oss"], cut, ModelOptions(), TensorGroup())
    with pytest.raises(LayoutError, match="adapters are for whole experts"):
        make_plan(MODELS["mixtral"], cut, adapters, TensorGroup())


def test_expert_parallel_sizes_that_do_not_fit_are_refused_with_the_arithmetic() -> None:
    layout = Layout(1, 1, 1, 4, stage_layers=(4,))
    with pytest.raises(
        LayoutError, match="etp x ep = 1 x 4 = 4 has to divide the tp x dp = 6 ranks"
    ):
        check_sizes(
            FEATURES["mixtral"],
            layout,
            world=6,
            options=ModelOptions(),
            sequence=16,
            microbatches=1,
        )
    with pytest.raises(LayoutError, match="the model has no experts"):
        check_sizes(
            MODELS["qwen3"], layout, world=4, options=ModelOptions(), sequence=16, microbatches=1
        )


def test_unknown_rope_scaling_is_refused() -> None:
    dynamic = changed(
        MODELS["qwen3"], {"positions.scaling": {"rope_type": "dynamic", "factor": 4.0}}
    )
    with pytest.raises(NotExpressible, match="'dynamic' can't be trained with"):
        Rotary(dynamic, torch.device("cpu"), torch.float32)

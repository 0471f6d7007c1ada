"""Nothing that a model computes is dropped on the way into other keys: it comes back, or it is refused by name."""

import json
import shutil
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import megaconv
from megaconv.errors import CheckpointError, NotExpressible, UnknownFamily
from megaconv.families import families, recognize
from megaconv.families.parts.meta_params import read_params, write_params
from megaconv.megatron.arguments.read import from_arguments, tensor_fields
from megaconv.megatron.arguments.write import to_arguments
from megaconv.model.config import ModelConfig
from megaconv.model.described import value_of
from megaconv.model.features import OF_LAYER, OF_MODEL
from megaconv.model.fields import FIELDS, NOT_COMPUTED, changed
from megaconv.model.layout import Layout
from megaconv.model.meaning import lost_fields, meaning_of
from megaconv.model.naming import LEGACY
from megaconv.model.training import TrainingState
from tests.config_models import BEYOND_MEGATRON, WITHOUT_CONFIG, raw_config, raw_gpt2, read
from tests.families.test_encoder_config import BERT, T5
from tests.models import write_llama
from tests.runs import run

FAMILIES = sorted(families())
PARTNERS: dict[str, dict[str, Any]] = {
    "experts.groups": {"experts.group_topk": 1},
    "experts.group_topk": {"experts.groups": 2},
    "latent.kv_rank": {"latent.rope_dim": 2, "latent.v_dim": 3},
    "experts.count": {"experts.ffn": 8, "experts.per_token": 1},
    "layers.indexed": {
        "block_indexer.heads": 2,
        "block_indexer.head_dim": 6,
        "block_indexer.block": 4,
        "block_indexer.topk": 2,
        "block_indexer.local": 1,
    },
    "layers.count": {"layers.mlp": "dense", "layers.window": None, "layers.mixer": "attention"},
    "indexer.heads": {"indexer.head_dim": 8, "indexer.topk": 4},
    "layers.mixer": {
        "linear.key_heads": 2,
        "linear.value_heads": 4,
        "linear.key_dim": 6,
        "linear.value_dim": 5,
        "linear.conv": 3,
        "mamba.heads": 4,
        "mamba.head_dim": 3,
        "mamba.groups": 2,
        "mamba.state": 7,
        "convolution.width": 3,
        "compressed.q_rank": 3,
        "compressed.out_groups": 2,
        "compressed.out_rank": 3,
    },
    "head.labels": {"tie_embeddings": False},
    "head.classes": {"head.activation": "", "head.binary": False, "tie_embeddings": False},
    "head.choices": {"head.activation": "", "head.binary": False, "tie_embeddings": False},
}
"""The further fields that must change with a field, so that the result is a valid model."""
FOLLOWS = {
    "experts.ffn": ("experts.shared_ffn",),
    "experts.count": ("experts.shared_ffn", "attention.heads"),
    "experts.per_token": ("attention.heads",),
    "hidden": ("embedding_scale", "attention.head_dim", "mlp.ffn", "head.divisor"),
    "mamba.heads": ("attention.heads",),
    "positions.scaling": ("temperature.scale", "temperature.interval"),
    "mamba.head_dim": ("attention.head_dim",),
    "attention.qkv_bias": ("attention.o_bias",),
    "attention.heads": ("attention.kv_heads", "attention.head_dim", "num_key_value_heads"),
    "attention.head_dim": ("attention.scale",),
    "attention.kv_heads": ("attention.heads", "layers.kv_heads", "num_key_value_heads"),
    "layers.shares_index": ("indexer_types",),
    "layers.kv_source": ("kv_source_layers",),
    "attention.head_gate": ("attention.output_gate",),
    "linear.value_heads": ("linear.key_heads",),
    "linear.value_dim": ("linear.key_dim",),
    "mlp.activation": ("hidden_act",),
    "head.activation": ("hidden_act",),
    "layers.rotates": ("layers.chunk", "no_rope_layers", "positions.theta"),
    "mlp.ffn": ("layers.ffn", "experts.ffn", "experts.shared_ffn"),
    "layers.mlp": ("mlp.ffn",),
    **dict.fromkeys(
        ("ngrams.size", "ngrams.heads", "ngrams.vocab", "ngrams.multiple"), ("layers.ngram_rows",)
    ),
    "layers.mixer": ("layers.window", "layers.rotates", "layers.indexed", "layers.ngram_rows"),
    "layers.ffn": ("use_double_wide_mlp",),
    "layers.keys_as_values": ("layers.kv_heads",),
    "layers.window": (
        "layers.rotates",
        "layers.head_dim",
        "layers.kv_heads",
        "layers.heads",
        "earlier layer has a window",
    ),
    "layers.shares_kv": ("layers.ffn", "layers.keys_as_values", "earlier layer has a window"),
    "attention.scale": ("square root of the head size",),
    "pad_token_id": (
        "positions.offset",
    ),  # RoBERTa's first position follows the padding token's row
    "tie_embeddings": ("head.divisor",),  # T5 scales its outputs if its head is the embedding
}
"""Fields in a fixed relation to another one, which messages name in place of it."""
SCALINGS: tuple[dict[str, Any], ...] = (
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 77},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "longrope", "factor": 4.0},
)  # fmt: skip
OTHER: dict[str, tuple[Any, ...]] = {
    "attention.heads": (16,),
    "attention.kv_heads": (2, 8),
    "layers.mixer": ("mamba", "linear", "attention", "convolution", "kda", "compressed", "mamba1", "lightning", "recurrent",
                     ("linear", "linear", "attention", "linear")),
    "layers.mlp": ("experts", "dense", "none", ("dense", "experts", "experts", "dense")),
    "layers.window": (7, (None, 7, None, 7), (7, 9, 7, 9), (None, None, 7, 7)),
    "layers.rotates": (False, (True, True, True, False)),
    "layers.chunk": (7, (7, 7, None, 7)),
    "layers.heads": (16, (None, 16, None, 16)),
    "layers.kv_heads": (2, (None, 2, None, 2), (None, 1, None, 1)),
    "layers.head_dim": (12, (None, 12, None, 12)),
    "layers.ffn": (60, (None, 60, None, 60), (None, None, None, 60)),
    "layers.indexed": (False, True, (True, False, False, True)),
    "layers.entries": ("none", "all", "selected", ("selected", "all", "none", "all")),
    "layers.hashed": (False, True, (True, False, True, False)),
    "layers.limit": (5.0, (None, None, 5.0, None)),
    "layers.shared_limit": (5.0, (None, None, 5.0, None)),
    "layers.sparsity": (0.5, (0.9, 0.9, 0.0, 0.0)),
    "layers.shares_kv": (False, (False, False, True, True), (True, False, False, False)),
    "layers.keys_as_values": (True, False, (False, True, False, True), (True, False, False, False)),
    "layers.kv_source": ((None, 0, 0, 0), (None, 0, None, None)),
    "layers.shares_index": (True, False, (False, False, True, True), (False, True, False, False)),
    "positions.sections": ((3, 2, 1),),
    "positions.kind": ("rope", "learned", "relative", "alibi"),
    "positions.scaling": SCALINGS,
    "compressed.scaling": SCALINGS,
    "norm.kind": ("RMSNorm", "LayerNorm"),
    "norm.place": ("before", "after", "both", "after_sum", "by_mixer", "residual"),
    "attention.qk_norm_width": ("head", "all", "own"),
    "mlp.activation": ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2"),
    "experts.score": ("softmax", "sigmoid", "sqrt_softplus"),
    "head.activation": ("", "gelu", "gelu_tanh"),
    "dtype": ("float16",),
    "eos_token_id": (5, (5, 6)),
}  # fmt: skip


CAPS_LOGITS = (
    "recurrent_gemma",
    "beam",
    "gemma2",
    "gemma3n_text",
    "gemma4_text",
    "gemma4_unified_text",
    "mistral_large4_text",
    "muse_glimmer_text",
    "muse_spark_text",
    "nanochat",
    "vaultgemma",
)
"""Families whose config.json may have a cap of logits."""

TOWERS = {"retriever.towers": "separate", "retriever.projection": 7}
RETRO = {
    "positions.kind": "learned",
    "layers.count": 6,
    "retrieval.layers": 2,
    "retrieval.chunk": 4,
    "retrieval.neighbors": 2,
    "retrieval.chunks": 2,
}


def model(family: str) -> ModelConfig:
    """One that its family's config.json describes, or Megatron's arguments if the family has no config.json."""
    if family == "biencoder":
        tower = {"head.activation": "", "head.binary": False, "tie_embeddings": False}
        return changed(replace(model("bert"), family=family), tower | TOWERS)
    if family == "retro":
        return changed(replace(model("gpt2"), family=family), RETRO)
    if family == "gpt2":
        return read(raw_gpt2(n_layer=4, torch_dtype="bfloat16"))
    if family in ("bert", "t5"):
        keys = {"num_hidden_layers": 4} if family == "bert" else {"num_layers": 4}
        return read({**(BERT if family == "bert" else T5), **keys})
    usual = {"norm_topk_prob": True, "n_group": 1, "topk_group": 1} if family == "glm4_moe" else {}
    return read(raw_config(family, torch_dtype="bfloat16", **usual))


def others(config: ModelConfig, field: str) -> Iterator[Any]:
    """Other values that a field may have."""
    value = value_of(config, field)
    if field in OTHER:
        yield from (other for other in OTHER[field] if other != value)
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, 2 * value + 2)
    elif isinstance(value, float):
        yield value * 2 + 0.25
    else:
        yield from (3, 0.5)


def variants(family: str) -> Iterator[tuple[str, Any, ModelConfig]]:
    """(field, value, model) for every other value of every field that makes another model."""
    config = model(family)
    usual = meaning_of(config)
    for field in FIELDS:
        for value in others(config, field):
            try:
                variant = changed(config, {**PARTNERS.get(field, {}), field: value})
            except CheckpointError:
                continue  # no model has it
            if meaning_of(variant) != usual:
                yield field, value, variant


def way_back(family: str, variant: ModelConfig) -> tuple[ModelConfig | None, str]:
    """(the model that came back from its config.json, or None, and why there is no such file)."""
    table = families()[family]
    try:
        return table.read_hf(table.write_hf(variant)), ""
    except NotExpressible as error:
        return None, str(error)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in WITHOUT_CONFIG])
def test_every_field_comes_back_from_config_json_or_is_refused_by_name(family: str) -> None:
    kept, refused = set(), set()
    for field, value, variant in variants(family):
        back, message = way_back(family, variant)
        if back is None:
            named = {
                field,
                *PARTNERS.get(field, ()),
                *FOLLOWS.get(field, ()),
                "represented as",
                "head is not its embedding",
                "one such layer, or none",
            }
            named |= {
                f"{word} {value_of(variant, 'mlp.activation')}"
                for word in ("a gated", "an ungated")
            }
            assert any(name in message for name in named), f"{field} = {value!r}: {message}"
            refused.add(field)
        else:
            assert not lost_fields(variant, back), f"{field} = {value!r} was dropped unnoticed"
            kept.add(field)
    assert {"vocab", "max_positions"} <= kept
    assert "layers.mixer" in refused
    assert "attention.score_cap" in (kept if family in ("gemma2", "vaultgemma") else refused)
    assert "head.logit_cap" in (kept if family in CAPS_LOGITS else refused)


@pytest.mark.parametrize("family", WITHOUT_CONFIG)
def test_a_model_without_config_json_is_refused_one(family: str) -> None:
    for _, _, variant in variants(family):
        with pytest.raises(
            NotExpressible, match=r"has no config\.json of its own|has no class for"
        ):
            families()[family].config_json(variant)


def told_again(config: ModelConfig, *, legacy: bool = False) -> ModelConfig:
    """The configuration, read back from Megatron's arguments and the tensors."""
    arguments = to_arguments(
        config, Layout(stage_layers=(config.layer_count,)), TrainingState(), transformer_impl="local", grouped_experts=False,
        vocab_divisor=1, padded_vocab=config.vocab, legacy=legacy,
    )  # fmt: skip
    return from_arguments(
        Namespace(**arguments), tensor_fields(config), legacy=legacy, family=config.family
    )


@pytest.mark.parametrize("legacy", [False, True], ids=["core", "legacy"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_comes_back_from_megatrons_arguments_or_is_refused(
    family: str, legacy: bool
) -> None:
    kept = set()
    for field, value, variant in variants(family):
        try:
            back = told_again(variant, legacy=legacy)
        except CheckpointError:
            continue
        assert not lost_fields(variant, back, but=NOT_COMPUTED), (
            f"{field} = {value!r} was dropped unnoticed"
        )
        kept.add(field)
    assert (
        kept
        or family in ("bert", "t5", *BEYOND_MEGATRON)
        or (legacy and not families()[family].rows[0].spelling(LEGACY))
    )


@pytest.mark.parametrize("kind", ["meta", "mistral"])
@pytest.mark.parametrize("family", ["llama", "mistral", "mixtral"])
def test_every_field_comes_back_from_params_json_or_is_refused(
    family: str, kind: str, tmp_path: Any
) -> None:
    for field, value, variant in variants(family):
        try:
            params = write_params(variant, kind, allow_lossy=False)
        except CheckpointError:
            continue
        found = {
            "vocab": variant.vocab,
            "mlp.ffn": variant.mlp.ffn,
            "tie_embeddings": variant.tie_embeddings,
        }
        back = read_params(params, kind, found, tmp_path)
        assert not lost_fields(variant, back, but=(*NOT_COMPUTED, "max_positions")), (
            f"{field} = {value!r}"
        )


@pytest.mark.parametrize("family", [name for name in FAMILIES if families()[name].recognized])
def test_a_family_is_recognized_by_its_own_declaration_and_by_no_other(family: str) -> None:
    config = model(family)
    if family == "t5":
        config = changed(config, {"attention.scale": None, "head.bias": True})
    if family == "mistral":
        config = changed(config, {"layers.window": 9})
    assert recognize(config).name == family


def test_a_model_that_no_family_has_gets_the_nearest_named() -> None:
    odd = changed(model("llama"), {"attention.sinks": True})
    with pytest.raises(
        UnknownFamily, match="the nearest is llama, and differs in: the model has sinks"
    ):
        recognize(odd)


def test_tables_and_families_name_only_features_that_there_are() -> None:
    named = {
        word
        for table in families().values()
        for row in table.rows
        for word in (row.when or "").split()
    }
    named |= {word for table in families().values() for word in (table.recognized or "").split()}
    assert {word.removeprefix("!") for word in named} <= OF_MODEL.keys() | OF_LAYER.keys()


# A run that goes on with other arguments than the config.json of its beginning.


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run")
    megaconv.convert(write_llama(root / "hf"), root / "core", saver="core")
    return root / "core"


def stale(core: Path, into: Path, **keys: Any) -> Path:
    """The checkpoint beside a config.json that says something else."""
    shutil.copytree(core, into)
    (into / "megaconv.json").unlink()
    path = into / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    return into


@pytest.mark.parametrize(
    ("word", "value", "field"),
    [
        ("rope_theta", 12345.0, "positions.theta"),
        ("rms_norm_eps", 3e-4, "norm.epsilon"),
        ("max_position_embeddings", 77, "max_positions"),
    ],
)
def test_the_arguments_of_the_run_win_over_a_stale_config_json(
    core: Path, word: str, value: Any, field: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, right = (
        stale(core, tmp_path / "core", **{word: value}),
        json.loads((core / "hf" / "config.json").read_text()),
    )
    outcome = run("convert", "--load-dir", path, "--saver", "hf", "--save-dir", tmp_path / "out")
    assert outcome.status == 0
    assert f"{path / 'hf' / 'config.json'} says {field} = {value}" in caplog.text
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == right


def test_config_wins_where_it_is_asked_for(
    core: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = stale(core, tmp_path / "core", rope_theta=12345.0)
    outcome = run(
        "convert",
        "--load-dir",
        path,
        "--config",
        path / "hf",
        "--saver",
        "hf",
        "--save-dir",
        tmp_path / "out",
    )
    assert outcome.status == 0
    assert "--config wins" in caplog.text
    assert json.loads((tmp_path / "out" / "config.json").read_text())["rope_theta"] == 12345.0


def test_another_structure_stays_an_error(core: Path, tmp_path: Path) -> None:
    outcome = run(
        "inspect", stale(core, tmp_path / "core", num_key_value_heads=2, num_attention_heads=2)
    )
    assert outcome.status == 3
    assert "it describes another model" in outcome.err


def test_a_field_left_out_on_purpose_is_not_reported_as_a_change(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scaling = {"rope_type": "dynamic", "factor": 4.0}
    hf = write_llama(tmp_path / "hf", extra_config={"rope_scaling": scaling})
    megaconv.convert(hf, tmp_path / "core", saver="core", allow_lossy=("rope_scaling",))
    caplog.clear()
    outcome = run(
        "convert", "--load-dir", tmp_path / "core", "--saver", "hf", "--save-dir", tmp_path / "out"
    )
    assert (outcome.status, caplog.text) == (0, "")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["rope_scaling"] == scaling

"""Every saver with every family: what it writes is read back by ourselves as the same model, or it is refused unwritten."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import megaconv
from megaconv import registry
from megaconv.engine.opening import open_source
from megaconv.errors import NotExpressible
from megaconv.families import families, read_config
from megaconv.families.parts.hf_config import CONFIG_NAME
from megaconv.input import find_input
from megaconv.model.ir import Key
from megaconv.model.layout import Chunk, Layout
from megaconv.model.naming import HF
from megaconv.model.natives import native_tensors
from megaconv.options import SaveOptions
from tests.config_models import BEYOND_MEGATRON, WITHOUT_CONFIG, raw_config, raw_gpt2
from tests.conftest import FIXTURES
from tests.families.test_encoder_config import BERT, T5
from tests.models import write_config
from tests.strategies import has_experts

FAMILIES = sorted(families())
SAVERS: dict[str, dict[str, Any]] = {
    "hf": {"saver": "hf"},
    "dcp": {"saver": "dcp"},
    "deepspeed": {"saver": "deepspeed"},
    "core": {"saver": "core", "tp": 2, "pp": 2},
    "core, local layers": {"saver": "core", "transformer_impl": "local"},
    "core, grouped experts": {"saver": "core", "moe_grouped_gemm": True},
    "torch_dist": {"saver": "core", "ckpt_format": "torch_dist", "tp": 2},
    "zarr": {"saver": "core", "ckpt_format": "zarr"},
    "legacy": {"saver": "legacy", "tp": 2},
    "meta": {"saver": "llama_mistral", "checkpoint_type": "meta"},
    "mistral": {"saver": "llama_mistral", "checkpoint_type": "mistral"},
}
ALWAYS = ("hf", "dcp", "deepspeed")
"""Savers that any model from Hugging Face can be written with."""
IN_MEGATRON = ("core", "torch_dist", "zarr")
"""The formats of Megatron for all models but T5: core has no layers for its relative positions. Models without a
config.json have only these."""
MEGATRONS = {"biencoder": "biencoder-legacy-separate", "retro": "retro-tp2-torch"}
"""Checkpoints that Megatron wrote, of the families without a config.json."""
NOT_READ = ("biencoder", "hf")
"""A directory for sentence-transformers, which megaconv doesn't read: tests/families/test_biencoders.py computes with it."""


def config_of(family: str) -> dict[str, Any]:
    known = {
        "gpt2": raw_gpt2(n_layer=4),
        "bert": BERT | {"num_attention_heads": 4},
        "t5": T5 | {"num_heads": 4},
    }
    keys = {
        "glm4_moe": {"norm_topk_prob": True, "num_experts_per_tok": 4},
        "internlm2": {"bias": False},  # Megatron has no layers with these biases
    }
    return known.get(family) or raw_config(family, torch_dtype="bfloat16", **keys.get(family, {}))


def options_of(family: str, words: str) -> dict[str, Any]:
    """Options of a conversion with two expert ranks. Experts with biases can't be sharded. A T5 needs stages of two
    kinds.

    A Retro has no stages, and a legacy biencoder has one rank.
    """
    options = dict(SAVERS[words])
    if family in ("t5", "retro"):
        options.pop("pp", None)
    if (family, words) == ("biencoder", "legacy"):
        options.pop("tp")
    return options | ({"ep": 2} if has_experts(family) and options["saver"] == "core" else {})


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A Hugging Face directory of every family, with random weights; Megatron's own checkpoint if there is no such one."""
    assert sorted(MEGATRONS) == sorted(WITHOUT_CONFIG)
    made = [family for family in FAMILIES if family not in MEGATRONS]
    written = {family: write_model(family, tmp_path_factory.mktemp(family)) for family in made}
    return written | {family: FIXTURES / name for family, name in MEGATRONS.items()}


def always(family: str) -> tuple[str, ...]:
    """The savers that must not refuse a family."""
    if family in WITHOUT_CONFIG:
        legacy = ("legacy",) if family == "biencoder" else ()
        return (*IN_MEGATRON, *legacy)
    return ALWAYS if family in ("t5", *BEYOND_MEGATRON) else (*ALWAYS, *IN_MEGATRON)


def write_model(name: str, path: Path, **keys: Any) -> Path:
    """keys: those of config.json that differ from the family's usual ones."""
    write_config(path, config_of(name) | keys)
    family, config = read_config(path / CONFIG_NAME)
    whole = Chunk(0, 0, 0, config.layer_count, is_first=True, is_last=True)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        native.name: (
            torch.randn(native.shape, generator=generator) / 50 + is_stored_less_1(native.name)
        ).to(torch.bfloat16)
        for native in native_tensors(family.rows, config, HF, Layout(), 0, whole, config.vocab)
        if not native.copy
    }
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def is_stored_less_1(name: str) -> bool:
    """True for weights that Transformer Engine's layers store minus 1. bfloat16 has w - 1 exactly for w near 1, as in
    trained models."""
    return name.endswith("linear_attn.norm.weight")


def combinations() -> Iterator[Any]:
    """Some families with every saver and every family with some savers at once; all the others are slow."""
    every = ("deepseek_v3", "gpt_oss", "llama", "qwen3_next", "t5")
    for number, family in enumerate(FAMILIES):
        for position, words in enumerate(SAVERS):
            if "moe_grouped_gemm" in SAVERS[words] and not has_experts(family):
                continue  # wrong usage
            if (family, words) == NOT_READ:
                continue
            at_once = family in (*every, *MEGATRONS) or (number + position) % 3 == 0
            yield pytest.param(family, words, marks=[] if at_once else [pytest.mark.slow])


@pytest.mark.parametrize(("family", "words"), list(combinations()))
def test_every_output_verifies_or_is_refused(
    family: str, words: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    source, target = sources[family], tmp_path / "out"
    try:
        report = megaconv.convert(
            source, target, verify=True, workers=2, **options_of(family, words)
        )
    except NotExpressible:
        assert words not in always(family)
        assert not list(tmp_path.iterdir())
        return
    assert report.verified
    assert megaconv.fingerprint(target).weights == megaconv.fingerprint(source).weights


@pytest.mark.parametrize("family", ["deepseek_v4", "mistral_large4_text", "qwen3_moe"])
def test_names_of_classes_are_told_from_those_of_files(
    family: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    """The embedding of some families has another name in their class than in their files."""
    names = {"names": "transformers-stacked"}
    megaconv.convert(sources[family], tmp_path / "dcp", saver="dcp", options=names)
    read = megaconv.fingerprint(tmp_path / "dcp").weights
    assert read == megaconv.fingerprint(sources[family]).weights


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"saver": "legacy"}, "legacy models can't represent a phi3; choose --saver core"),
        (
            {"saver": "llama_mistral", "checkpoint_type": "mistral"},
            "Mistral's files have no names for a phi3; choose --saver hf",
        ),
    ],
)
def test_a_format_without_names_for_a_family_is_named_with_another(
    options: dict[str, Any], refusal: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(NotExpressible, match=refusal):
        megaconv.convert(sources["phi3"], tmp_path / "out", **options)


@pytest.mark.parametrize("family", ["kimi_linear", "lfm3"])
def test_a_model_without_experts_is_read_under_the_names_of_its_class(
    family: str, tmp_path: Path
) -> None:
    keys = {"first_k_dense_replace": 4} if family == "kimi_linear" else {}
    source = write_model(family, tmp_path / "hf", **keys)
    megaconv.convert(source, tmp_path / "zero", saver="deepspeed")
    read = megaconv.fingerprint(tmp_path / "zero").weights
    assert read == megaconv.fingerprint(source).weights


@pytest.mark.parametrize(
    ("family", "saver"), [("phi3", "hf"), ("phi3", "dcp"), ("gpt2", "hf"), ("gpt_oss", "dcp")]
)
def test_a_fused_tensor_of_several_dtypes_is_found_in_the_plan(
    family: str, saver: str, sources: dict[str, Path]
) -> None:
    header = open_source(find_input(sources[family])).header
    key = Key("layers.1.attn.k.weight")
    if family == "gpt_oss":
        key = Key("layers.1.mlp.experts.2.gate_up.weight")
    mixed = replace(
        header, manifest={**header.manifest, key: header.manifest[key]._replace(dtype="float32")}
    )
    with pytest.raises(
        NotExpressible, match="would join tensors of bfloat16 and float32; give --dtype"
    ):
        registry.saver(saver).plan(mixed, SaveOptions())

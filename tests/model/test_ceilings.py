"""Numbers in files: each has a ceiling before anything of that size is counted out or made; names of files too."""

import json
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megaconv
from formats import torch_zip
from megaconv.engine.opening import open_source
from megaconv.errors import CheckpointError, CorruptCheckpoint, LayoutError
from megaconv.families import families, read_config
from megaconv.input import find_input
from megaconv.megatron.arguments.read import read_layout
from megaconv.model.ceilings import ALL_EXPERTS, EXPERTS, LAYERS, RANKS, require_countable
from megaconv.model.config import ModelConfig
from megaconv.model.fields import changed
from megaconv.model.layout import LayerSplit, parse_pattern, split_layers
from tests.config_models import raw_config, read
from tests.conftest import FIXTURES
from tests.forks import start
from tests.models import write_llama
from tests.runs import Outcome, assert_refused, finish

HUGE = (10**6, 10**9, 10**12, 10**18, 10**30, 10**400, -(10**9))

LIMITED = """
import resource
resource.setrlimit(resource.RLIMIT_DATA, (500 << 20, 500 << 20))
resource.setrlimit(resource.RLIMIT_CPU, (10, 10))
"""
"""Half a gigabyte and ten seconds of a processor."""


def decoder(sizes: dict[str, int]) -> ModelConfig:
    return changed(read(raw_config("llama")), sizes)


def limited(*arguments: object) -> Outcome:
    return finish(start(*arguments, before=LIMITED), 60)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("model") / "llama", layers=2)


def with_words(source: Path, target: Path, name: str, words: dict[str, Any]) -> Path:
    copytree(source, target)
    said = json.loads((target / name).read_text())
    (target / name).write_text(json.dumps(said | words))
    return target


SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
)


@pytest.mark.parametrize("number", HUGE)
def test_a_size_of_any_number_in_config_json_is_refused_at_once(
    llama: Path, number: int, tmp_path: Path
) -> None:
    for index, name in enumerate(SIZES):
        copy = with_words(llama, tmp_path / str(index), "config.json", {name: number})
        with pytest.raises(CheckpointError) as error:
            open_source(find_input(copy))
        assert len(str(error.value)) < 1000


def test_huge_numbers_take_neither_time_nor_memory(llama: Path, tmp_path: Path) -> None:
    copy = with_words(llama, tmp_path / "x", "config.json", {"num_hidden_layers": 10**9})
    assert_refused(
        limited("inspect", copy),
        3,
        "config.json: num_hidden_layers should be at most 2,000, found 1,000,000,000",
    )


FAMILY_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers", "first_k_dense_replace", "max_window_layers",
                "num_nextn_predict_layers", "decoder_sparse_step")  # fmt: skip


@pytest.mark.parametrize(
    "family", sorted(name for name, table in families().items() if not table.no_class)
)
@pytest.mark.parametrize("word", FAMILY_KEYS)
def test_no_family_counts_to_a_huge_number(family: str, word: str, tmp_path: Path) -> None:
    """Whatever the family makes of the word: it is refused before."""
    architecture = families()[family].architectures[0]
    for number in (10**9, -(10**9), 1e300):
        (tmp_path / "config.json").write_text(
            json.dumps({"architectures": [architecture], word: number})
        )
        with pytest.raises(CorruptCheckpoint, match=f"config.json: {word} should be at most 2,000"):
            read_config(tmp_path / "config.json")


def test_words_that_count_layers_are_found_at_every_depth() -> None:
    with pytest.raises(CorruptCheckpoint, match="x: num_hidden_layers should be at most"):
        require_countable({"text_config": {"num_hidden_layers": LAYERS + 1}}, "x")
    with pytest.raises(CorruptCheckpoint, match="x: layer_types should be at most"):
        require_countable({"layer_types": ["full_attention"] * (LAYERS + 1)}, "x")
    require_countable(
        {
            "num_hidden_layers": LAYERS,
            "layer_norm_eps": 1e-5,
            "vision_feature_layer": -2,
            "layers": None,
        },
        "x",
    )


@pytest.mark.parametrize(
    "sizes",
    [
        {"layers.count": LAYERS + 1},
        {"experts.count": EXPERTS + 1, "experts.per_token": 1, "experts.ffn": 1},
        {"layers.count": 1000, "experts.count": ALL_EXPERTS // 1000 + 1, "experts.per_token": 1, "experts.ffn": 1},
        {"hidden": 1 << 25}, {"vocab": 1 << 29}, {"mtp_layers": LAYERS + 1}, {"max_positions": 1 << 41},
    ],
)  # fmt: skip
def test_a_model_above_a_ceiling_can_not_be(sizes: dict[str, int]) -> None:
    with pytest.raises(CorruptCheckpoint, match=r"at most|in all"):
        decoder(sizes)


def test_more_experts_than_a_file_can_hold_are_refused_before_they_are_named(
    tmp_path: Path,
) -> None:
    words = {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 49_000,
        "num_experts_per_tok": 2,
    }
    copy = with_words(
        write_llama(tmp_path / "llama", layers=2), tmp_path / "x", "config.json", words
    )
    assert_refused(limited("inspect", copy), 3, "49,000 experts in each of 2 layers", "incomplete")


# Meta's files.


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(10**9, marks=pytest.mark.slow),
        10**18,
        pytest.param(10**30, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "name", ["dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "max_seq_len", "multiple_of"]
)
def test_a_size_of_any_number_in_params_json_is_refused_or_harmless(
    llama: Path, name: str, number: int, tmp_path: Path
) -> None:
    meta = tmp_path / "meta"
    megaconv.convert(llama, meta, saver="llama_mistral")
    found = limited(
        "inspect", with_words(meta, tmp_path / str(number), "params.json", {name: number})
    )
    assert found.status in (0, 3), found
    assert found.status == 0 or len(found.err.splitlines()) == 1


def test_a_shard_with_a_huge_number_is_refused_at_once(llama: Path, tmp_path: Path) -> None:
    meta = tmp_path / "meta"
    megaconv.convert(llama, meta, saver="llama_mistral")
    (meta / "consolidated.00.pth").rename(meta / "consolidated.99999999999.pth")
    outcome = limited("inspect", meta)
    assert_refused(
        outcome,
        3,
        "99999999999 of 100,000,000,000 shards missing: consolidated.00.pth, consolidated.01.pth",
    )


# Megatron's files.

CORE = FIXTURES / "core-mixtral-seq-tp2pp2ep2" / "checkpoint"


@pytest.mark.parametrize(
    "name",
    ["mp_rank_99999999999_000_000", "mp_rank_00_99999999999_000", "mp_rank_00_000_99999999999"],
)
def test_a_rank_directory_with_a_huge_number_is_refused_at_once(name: str, tmp_path: Path) -> None:
    copytree(CORE, tmp_path / "x")
    (version,) = (tmp_path / "x").glob("iter_*")
    (version / "mp_rank_01_001_001").rename(version / name)
    assert_refused(
        limited("inspect", tmp_path / "x"),
        3,
        "there is a rank directory of rank 99999999999, but there are 8 in all",
    )


def test_a_layout_string_is_not_written_out_to_any_length() -> None:
    for pattern in (
        "Et*99999999999L",
        "E(t|)*99999999999L",
        "E((t*9999)*9999|)*9999L",
        "Et*" + "9" * 4000 + "L",
    ):
        with pytest.raises(LayoutError) as error:
            split_layers(2, 2, 1, LayerSplit(pattern=pattern))
        assert len(str(error.value)) < 500_000
    assert parse_pattern("E(t|)*1000tL") == (1,) * 1001


def test_a_layout_of_any_number_of_ranks_is_not_counted_out() -> None:
    for split in (LayerSplit(), LayerSplit(first=1, last=1)):
        with pytest.raises(LayoutError, match="at most 65,536"):
            split_layers(2, 10**12, 1, split)
    args = Namespace(
        pipeline_model_parallel_size=10**12,
        decoder_first_pipeline_num_layers=1,
        decoder_last_pipeline_num_layers=1,
    )
    assert read_layout(args, decoder({"layers.count": 2})).pp == 1
    assert (
        read_layout(
            Namespace(tensor_model_parallel_size=RANKS + 1), decoder({"layers.count": 2})
        ).tp
        == 1
    )


FIXTURE_NAMES = (
    *("core-llama-tp1pp1", "core-gpt2-tp1pp1", "core-mixtral-seq-tp1ep1", "core-te-mixtral-seq-tp1ep2", "core-bert-tp2pp2"),
    *("core-t5-tp2pp1", "legacy-llama-tp1pp1", "old-gpt2-tp2-ckptv0", "core-te-mixtral-grouped-tp2ep2"),
)  # fmt: skip

OPTIONAL = {
    f"{name}: accepted"
    for name in (
        "embedding.tokentype_embeddings.weight",
        "output_layer.bias",
        "position_embeddings.weight",
    )
}
"""Tensors without which a BERT or T5 is another valid one."""

Change = Callable[[dict[Any, Any], str], None]


def models(state: Any) -> Iterator[dict[Any, Any]]:
    """Every dictionary of tensors in what a rank file holds, however deep."""
    if isinstance(state, dict):
        if any(hasattr(value, "read_into") for value in state.values()):
            yield state
        for value in state.values():
            yield from models(value)


def refused(fixture: str, change: Change, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The errors after each tensor of the first rank file, in all that have one of its name, was changed."""
    checkpoint, intact = FIXTURES / fixture / "checkpoint", torch_zip.read
    first = min(checkpoint.rglob("model_optim_rng.pt"))
    names = {
        name
        for model in models(weights(intact(first)))
        for name in model
        if not name.endswith("_extra_state")
    }

    def read(path: Path, name: str) -> object:
        state = intact(path)
        for model in models(weights(state)):
            if name in model:
                change(model, name)
        return state

    errors = []
    for name in sorted(names):
        monkeypatch.setattr(torch_zip, "read", partial(read, name=name))
        try:
            open_source(find_input(checkpoint))
            errors.append(f"{name}: accepted")
        except CheckpointError as error:
            errors.append(str(error))
    return errors


def weights(state: Any) -> Any:
    return state["model"]


@pytest.mark.parametrize("fixture", FIXTURE_NAMES)
def test_a_model_without_any_one_of_its_tensors_is_refused_in_one_line(
    fixture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = refused(fixture, lambda model, name: model.pop(name), monkeypatch)
    assert len(errors) > 10
    assert not [
        error
        for error in errors
        if "\n" in error or (error.endswith(": accepted") and error not in OPTIONAL)
    ]


def test_a_layer_without_its_second_matrix_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    errors = refused("core-llama-tp1pp1", lambda model, name: model.pop(name), monkeypatch)
    for missing in ("linear_fc1.weight", "linear_fc2.weight"):
        for layer in range(4):
            name = f"decoder.layers.{layer}.mlp.{missing}"
            assert [error for error in errors if f"1 tensor is missing: {name}" in error], errors


@pytest.mark.parametrize("shape", [(), (0, 0), (2, 0, 5), (1 << 62, 1 << 62)])
@pytest.mark.parametrize(
    "fixture",
    [
        *FIXTURE_NAMES[:4],
        *(pytest.param(name, marks=pytest.mark.slow) for name in FIXTURE_NAMES[4:]),
    ],
)
def test_a_model_with_any_one_tensor_of_another_shape_is_refused_in_one_line(
    fixture: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def reshape(model: dict[Any, Any], name: str) -> None:
        model[name] = SimpleNamespace(shape=shape, dtype="float32", read_into=None)

    errors = refused(fixture, reshape, monkeypatch)
    assert not [error for error in errors if "\n" in error or error.endswith(": accepted")]


def test_the_process_that_is_limited_can_do_its_work(llama: Path, tmp_path: Path) -> None:
    """Or the tests above would prove nothing."""
    outcome = limited(
        "convert", "--load-dir", llama, "--saver", "core", "--save-dir", tmp_path / "out"
    )
    assert outcome.status == 0, outcome.err


@pytest.mark.parametrize("iteration", [-1, 10**13, 10**30], ids=["negative", "large", "huge"])
def test_an_iteration_of_any_number_is_refused(iteration: int, llama: Path, tmp_path: Path) -> None:
    megaconv.convert(llama, tmp_path / "core", saver="core")
    (tmp_path / "core" / "megaconv.json").unlink()
    (file,) = (tmp_path / "core").rglob("model_optim_rng.pt")
    torch.save(torch.load(file, weights_only=False) | {"iteration": iteration}, file)
    with pytest.raises(CorruptCheckpoint, match="its iteration should be from 0"):
        megaconv.convert(tmp_path / "core", tmp_path / "out", saver="core")

"""`convert --layers`: layers left out, repeated and reordered, in all formats; and what is refused."""

import json
import shutil
import signal
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from megaconv.engine.chosen_layers import with_layers
from megaconv.errors import CheckpointError, NotExpressible, UnsupportedInput
from megaconv.families import families
from megaconv.model.config import ModelConfig
from megaconv.model.ir import Header, Key, OpenedSource, TensorInfo
from megaconv.model.meaning import config_differences
from megaconv.model.table import canonical_shapes
from megaconv.options.values import layer_numbers
from tests import transformers_oracle as oracle
from tests.conftest import FIXTURES
from tests.engine.averaged_models import weights
from tests.engine.journeys import FAMILIES, settings
from tests.engine.test_chains import config_of
from tests.engine.test_interrupted import KILL
from tests.families.test_families import write_model
from tests.forks import start
from tests.models import write_llama
from tests.runs import assert_refused, finish, run

ALL = {**oracle.VARIANTS, **oracle.MIXTURES, **oracle.BEYOND_MEGATRON, **oracle.CONVERTED}
QUICK = (
    "llama",
    "gpt2",
    "qwen2, window on the last layer",
    "gemma3_text",
    "gemma4_text, keys as values",
    "glm4_moe",
    "kimi_linear",
)
EACH = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in ALL]
REFUSED = (
    "bamba",
    "beam",
    "diffllama",
    "dory",
    "gemma3n_text",
    "gemma4_text, layer inputs",
    "gpt_neox_japanese",
    "jamba",
    "longcat_flash",
    "minimax",
    "zamba",
    "zamba2",
)
"""Variants whose layers depend on their numbers or on their neighbours: their names, up to a comma."""

BY_NUMBER = (
    "gemma4_text, experts",
    "gemma4_text, keys as values",
    "granite_moe_swa",
    "granite_swa",
    "molmo2_text, some layers scaled",
)
"""Variants whose class asks the configuration about each layer, so that no test can take a layer out of a loaded model."""


def hashes(model: Path) -> dict[str, str]:
    return {str(key): value for key, value in megaconv.fingerprint(model).tensors.items()}


def assert_layers(output: Path, source: Path, chosen: list[int]) -> None:
    """The output has the source's tensors of these layers under their new numbers, and all others."""
    whole = hashes(source)
    expected = {name: value for name, value in whole.items() if not name.startswith("layers.")}
    for new, old in enumerate(chosen):
        here = f"layers.{old}."
        layer = {name.removeprefix(here): whole[name] for name in whole if name.startswith(here)}
        expected |= {f"layers.{new}.{name}": value for name, value in layer.items()}
    assert hashes(output) == expected


def logits_of_layers(model: Path, chosen: list[int], tokens: torch.Tensor) -> torch.Tensor:
    """The logits that transformers computes with these layers of a model."""
    whole: Any = oracle.load(model)
    for name, module in list(whole.named_modules()):
        if name.rpartition(".")[2] in ("layers", "h", "blocks"):
            chosen_layers = torch.nn.ModuleList(module[layer] for layer in chosen)
            whole.set_submodule(name, chosen_layers)
    configs = [each.config for each in whole.modules() if hasattr(each, "config")]
    for config in {id(each): each for each in configs}.values():
        config.use_cache = False
        with suppress(AttributeError):  # in some classes it follows from other keys
            config.num_hidden_layers = len(chosen)
            config.layer_types = [config.layer_types[layer] for layer in chosen]
    return oracle.compute(whole, tokens)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama") / "hf", layers=6)


@pytest.mark.oracle
@pytest.mark.parametrize("name", EACH)
def test_transformers_loads_the_chosen_layers_of_each_family(name: str, tmp_path: Path) -> None:
    oracle.create(ALL[name], tmp_path / "hf")
    chosen = [0, 1, 2, 3, 3]
    try:
        megaconv.convert(tmp_path / "hf", tmp_path / "out", saver="hf", layers=chosen, workers=1)
    except (NotExpressible, UnsupportedInput):
        assert name in REFUSED or name.partition(",")[0] in REFUSED
        return
    assert name not in REFUSED
    assert_layers(tmp_path / "out", tmp_path / "hf", chosen)
    tokens = torch.randint(7, 120, (1, 12))
    found = oracle.compute(oracle.load(tmp_path / "out"), tokens)
    if name in BY_NUMBER:
        assert found.isfinite().all()
        return
    expected = logits_of_layers(tmp_path / "hf", chosen, tokens)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_moe"])
def test_the_logits_are_those_of_transformers_without_these_layers(
    name: str, tmp_path: Path
) -> None:
    oracle.create(ALL[name], tmp_path / "hf")
    megaconv.convert(tmp_path / "hf", tmp_path / "out", saver="hf", layers="0,3,2")
    tokens = torch.randint(7, 120, (2, 16))
    found = oracle.compute(oracle.load(tmp_path / "out"), tokens)
    expected = logits_of_layers(tmp_path / "hf", [0, 3, 2], tokens)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.oracle
def test_transformers_does_not_round_layers_of_another_dtype_than_the_whole_model(
    llama: Path, tmp_path: Path
) -> None:
    """It loads all weights in the dtype that config.json names."""
    from transformers import AutoModelForCausalLM

    mixed = shutil.copytree(llama, tmp_path / "mixed")
    file = mixed / "model.safetensors"
    wide = (".layers.1.", "embed", "lm_head")
    tensors = {
        name: torch.randn(tensor.shape).to(torch.float32 if any(map(name.count, wide)) else torch.bfloat16)
        for name, tensor in load_file(file).items()
    }  # fmt: skip
    save_file(tensors, file, metadata={"format": "pt"})
    assert megaconv.inspect(mixed).header.config.dtype == "bfloat16"
    megaconv.convert(mixed, tmp_path / "out", saver="hf", layers="1")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "float32"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").state_dict()
    for name, tensor in loaded.items():
        assert torch.equal(tensor, tensors[name.replace(".layers.0.", ".layers.1.")]), name


def test_layers_are_chosen_between_all_formats(llama: Path, tmp_path: Path) -> None:
    words = ["--saver", "core", "--tp", "2", "--pp", "3", "--ckpt-format", "torch_dist"]
    assert run("convert", llama, tmp_path / "core", *words).status == 0
    again = ["--saver", "core", "--pp", "1", "--layers", "0-1,4, 2 - 3", "--verify"]
    outcome = run("convert", tmp_path / "core", tmp_path / "cut", *again)
    assert outcome.status == 0, outcome.err
    assert "5 layers of the input: 0 to 1, 4, 2 to 3" in outcome.err
    assert_layers(tmp_path / "cut", llama, [0, 1, 4, 2, 3])
    assert run("verify", tmp_path / "cut").status == 0
    record = json.loads((tmp_path / "cut" / "megaconv.json").read_text())
    assert record["provenance"]["options"]["--layers"] == [0, 1, 4, 2, 3]


@pytest.mark.parametrize(("chosen", "group"), [([0, 1], 2), ([2, 3], 2), ([0, 2], None)])
def test_the_length_of_a_pattern_stays_if_the_chosen_layers_have_the_pattern(
    chosen: list[int], group: int | None, tmp_path: Path
) -> None:
    """The published code of a Bailing hybrid reads layer_group_size alone."""
    source = write_model(tmp_path / "hf", "bailing_hybrid", num_hidden_layers=4, layer_group_size=2)
    megaconv.convert(source, tmp_path / "out", saver="hf", layers=chosen)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written.get("layer_group_size") == group
    kinds = ("linear_attention", "full_attention")
    assert written["layer_types"] == [kinds[layer % 2] for layer in chosen]


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe", "flint"])
def test_config_json_says_which_of_the_chosen_layers_have_experts(
    family: str, tmp_path: Path
) -> None:
    """Every second layer of the input has experts. No step describes the output's."""
    model = write_model(tmp_path / "hf", family, decoder_sparse_step=2, mlp_only_layers=[])
    megaconv.convert(model, tmp_path / "out", saver="hf", layers=[1, 1, 0])
    assert_layers(tmp_path / "out", model, [1, 1, 0])


@pytest.mark.parametrize("name", FAMILIES)
def test_config_json_describes_the_chosen_layers_of_any_model(name: str) -> None:
    """Some families refuse all choices."""
    described = 0
    for number in range(40):
        random = Random(number)
        raw = config_of(name, random) | settings(name, random)
        with suppress(CheckpointError):  # no such model, or no such layers
            check_described(families()[name].read_hf(raw), random)
            described += 1
        if described == 4:
            return


def check_described(config: ModelConfig, random: Random) -> None:
    """The config.json of a model of any of the layers is read as that model."""
    table = families()[config.family]
    shapes = canonical_shapes(table.rows, config).items()
    manifest = {Key(name): TensorInfo(shape, config.dtype) for name, shape in shapes}
    layers = range(config.layer_count)
    chosen = random.choices(layers, k=random.randint(1, len(layers) + 1))
    source = OpenedSource(Header(config, manifest), {})
    made = with_layers(source, chosen, "the model").header.config
    written = table.read_hf(json.loads(table.config_json(made)))
    assert config_differences(written, made) == [], (chosen, config.hf)


@pytest.mark.parametrize("layers", ["0-2,5", "0-5,2-3", "3,2,1,0,5,4", "0-4"])
@pytest.mark.parametrize(
    "layout",
    [
        ["--tp", "2"],
        ["--pp", "2"],
        ["--pp", "2", "--vpp", "3"],
        ["--pp", "2", "--layer-split", "2,4"],
        ["--pp", "3", "--ckpt-format", "torch_dist"],
    ],
    ids=" ".join,
)
def test_layers_of_every_layout_are_chosen(
    layout: list[str], layers: str, llama: Path, tmp_path: Path
) -> None:
    assert run("convert", llama, tmp_path / "core", "--saver", "core", *layout).status == 0
    outcome = run(
        "convert", tmp_path / "core", tmp_path / "out", "--saver", "core", "--layers", layers
    )
    assert outcome.status == 0, outcome.err
    assert_layers(tmp_path / "out", llama, list(layer_numbers(layers)))


def test_the_stages_are_those_of_the_chosen_layers(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "hf", layers=7)
    words = ["convert", source, tmp_path / "out", "--saver", "core", "--layers", "0-5"]
    assert run(*words, "--pp", "2", "--layer-split", "2,4").status == 0
    layout = megaconv.inspect(tmp_path / "out").header.layout
    assert layout is not None
    assert layout.stage_layers == (2, 4)


def test_weights_that_changed_since_they_were_written_are_refused(
    llama: Path, tmp_path: Path
) -> None:
    megaconv.convert(llama, tmp_path / "hf", saver="hf")
    file = tmp_path / "hf" / "model.safetensors"
    tensors = weights(tmp_path / "hf")
    tensors["model.layers.4.self_attn.q_proj.weight"][0, 0] += 1
    save_file(tensors, file, {"format": "pt"})
    words = ["convert", tmp_path / "hf", tmp_path / "out", "--saver", "hf", "--layers"]
    refused = run(*words, "0,4,4")
    assert refused.status == 3
    assert "1 tensor with other values than were written: layers.4.attn.q.weight" in refused.err
    assert not (tmp_path / "out").exists()
    assert run(*words, "0-3,5").status == 0


@pytest.mark.parametrize(
    "fixture",
    [
        "pipelined-t5-tp1e2d2/checkpoint",
        "core-bert-tp2pp2/checkpoint",
        "biencoder-legacy-separate",
    ],
)
def test_several_stacks_of_layers_are_refused(fixture: str, tmp_path: Path) -> None:
    words = ["convert", FIXTURES / fixture, tmp_path / "out", "--saver", "core", "--layers", "0"]
    assert_refused(run(*words), 3, "several stacks of layers; leave --layers out")


def test_the_original_of_other_layers_is_refused(llama: Path, tmp_path: Path) -> None:
    words = ["convert", llama, tmp_path / "out", "--saver", "hf", "--layers", "0", "--base", llama]
    assert_refused(run(*words), 2, "--layers and --base", "leave --base out")


def test_layers_of_an_average_are_chosen_after_it(llama: Path, tmp_path: Path) -> None:
    other = write_llama(tmp_path / "other", layers=6, seed=3)
    assert run("average", llama, other, "--save-dir", tmp_path / "average").status == 0
    words = ["convert", llama, tmp_path / "out", "--average", other, "--saver", "hf"]
    assert run(*words, "--layers", "5,0").status == 0
    assert_layers(tmp_path / "out", tmp_path / "average", [5, 0])


def test_a_list_of_each_layer_that_no_family_writes_is_left_out(tmp_path: Path) -> None:
    settings = {
        "note": [1, 2, 3, 4],
        "by_number": {"3": {"a": 1}},
        "id2label": {"0": "x"},
        "other": [1, 2],
        "plain": {"a": 1},
    }
    source = write_llama(tmp_path / "hf", layers=4, extra_config=settings)
    megaconv.convert(source, tmp_path / "out", saver="hf", layers=[0, 1])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["num_hidden_layers"] == 2
    assert {key for key in settings if key in config} == {"id2label", "other", "plain"}


def test_a_killed_run_is_not_continued_with_other_layers(llama: Path, tmp_path: Path) -> None:
    words = ["convert", llama, tmp_path / "out", "--saver", "hf", "--resume", "--workers", 1]
    kill = KILL.format(owner="os", name="pwrite", number=30, journaled="pass")
    killed = finish(start(*words, "--layers", "0-3", before=kill))
    assert killed.status == -signal.SIGKILL, killed
    assert run(*words, "--layers", "2-5").status == 0
    assert_layers(tmp_path / "out", llama, [2, 3, 4, 5])


def test_optimizer_state_of_other_layers_is_left_out_and_refused(tmp_path: Path) -> None:
    trained = FIXTURES / "core-llama-optim-tp2pp2" / "checkpoint"
    words = ["convert", trained, tmp_path / "out", "--saver", "core", "--pp", "1", "--layers", "0"]
    assert_refused(run(*words, "--optimizer"), 2, "--optimizer", "--layers")
    assert run(*words).status == 0
    assert not megaconv.inspect(tmp_path / "out").header.has_optimizer


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("0-6", "has no layer 6; its layers are 0 to 5"),
        ("3-1", "write numbers of layers from 0, such as 0-15,24-31"),
        ("", "write numbers of layers from 0"),
        ("-1", "write numbers of layers from 0"),
        ("0-999999999", "write numbers of layers from 0"),
        ("a", "write numbers of layers from 0"),
        ("٣", "write numbers of layers from 0"),
    ],
)
def test_layers_that_there_are_not_are_one_line(
    layers: str, message: str, llama: Path, tmp_path: Path
) -> None:
    outcome = run("convert", llama, tmp_path / "out", "--saver", "hf", f"--layers={layers}")
    assert_refused(outcome, 2, "--layers", message)
    assert not (tmp_path / "out").exists()


def test_adapters_and_models_without_a_family_are_refused(llama: Path, tmp_path: Path) -> None:
    case = FIXTURES / "peft-llama-all-linear"
    words = ["--saver", "hf", "--layers", "0"]
    both = ["--adapter", case / "adapter"]
    assert_refused(
        run("convert", case / "base", tmp_path / "o", *words, *both), 2, "merge the adapter first"
    )
    unknown = tmp_path / "unknown"
    unknown.mkdir()
    (unknown / "config.json").write_text('{"model_type": "unheard_of", "architectures": ["X"]}')
    (unknown / "model.safetensors").write_bytes((llama / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="needs a model of a known family"):
        megaconv.convert(unknown, tmp_path / "o", saver="hf", layers=[0])


def test_numbers_of_layers_are_read() -> None:
    assert layer_numbers("0-2, 5,1") == (0, 1, 2, 5, 1)
    assert layer_numbers(range(3)) == (0, 1, 2)
    with pytest.raises(TypeError, match="expected int, found float"):
        layer_numbers([0.5])  # type: ignore[list-item]

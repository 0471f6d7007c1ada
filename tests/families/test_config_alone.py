"""A config.json without weights: inspected and planned with, and refused wherever weights are needed."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import megaconv
from megaconv.errors import CorruptCheckpoint
from megaconv.families import family
from tests import hub_server
from tests.config_models import raw_config
from tests.families.test_families import CONFIG_KEYS, write_model
from tests.families.test_language_models_inside import MODELS, create
from tests.forks import start
from tests.models import write_llama
from tests.runs import assert_refused, finish, run, unchanged


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "model", layers=4)


@pytest.fixture
def alone(llama: Path, tmp_path: Path) -> Path:
    """A directory with the same model's configuration and tokenizer."""
    path = tmp_path / "alone"
    path.mkdir()
    shutil.copy(llama / "config.json", path)
    (path / "tokenizer.json").write_text("{}")
    return path


def test_a_plan_is_that_of_the_model_with_its_weights(llama: Path, alone: Path) -> None:
    expected = run("plan", llama, "--gpus", 8, "--json")
    assert expected.status == 0
    for place in (alone, alone / "config.json", llama / "config.json"):
        assert run("plan", place, "--gpus", 8, "--json") == expected
    assert megaconv.plan(alone, gpus=8).to_json() == json.loads(expected.out)


def test_inspect_shows_the_model_and_says_that_there_are_no_weights(
    llama: Path, alone: Path
) -> None:
    whole = json.loads(run("inspect", llama, "--json").out)
    for place in (alone, alone / "config.json"):
        shown = run("inspect", place)
        assert (shown.status, shown.err) == (0, "")
        assert "convertible  no: it is a configuration alone, without weights" in shown.out
        found = json.loads(run("inspect", place, "--json").out)
        assert (found["convertible"], found["loader"]) == (False, "config")
        assert "without weights" in found["reason"]
        assert found["files"] == ["tokenizer.json"]
        for name in ("family", "parameters", "bytes", "dtypes", "config", "tensors"):
            assert found[name] == whole[name]
    assert (whole["convertible"], whole["reason"]) == (True, None)


def test_views_need_shapes_or_weights(llama: Path, alone: Path, tmp_path: Path) -> None:
    for view in ("--tree", "--layout"):
        assert run("inspect", alone, view) == run("inspect", llama, view)
    assert run("inspect", alone, "--megatron-args").status == 0
    assert run("inspect", alone, "--html", tmp_path / "page.html").status == 0
    for view in ("--tensors", "--stats"):
        assert_refused(
            run("inspect", alone, view),
            3,
            f"{alone}: has a config.json but no weights; expected one of",
        )
        assert_refused(
            run("inspect", alone / "config.json", view),
            3,
            "give the directory that holds the weights",
        )


def test_commands_that_need_weights_refuse_a_config_json_alone(
    llama: Path, alone: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    for place, words in (
        (alone, "has a config.json but no weights"),
        (llama / "config.json", "is a configuration;"),
    ):
        for command in (
            ["convert", place, out, "--saver", "core"],
            ["convert", place, out, "--saver", "core", "--dry-run"],
            ["convert", place, out, "--saver", "core", "--loader", "config"],
            ["fingerprint", place],
            ["diff", llama, place],
            ["diff", "--metadata", llama, place],
        ):
            assert_refused(run(*command), 3, f"{place}: {words}")
    assert_refused(run("verify", alone), 3, "has no megaconv.json")
    assert_refused(run("push", alone, "org/name", "--as-is", "--dry-run"), 3, "no weights")
    assert not out.exists()
    with pytest.raises(CorruptCheckpoint, match="no weights"):
        megaconv.open(alone)


def test_an_output_that_lost_its_weights_is_not_compared_with_its_record(
    llama: Path, tmp_path: Path
) -> None:
    megaconv.convert(llama, tmp_path / "out", saver="hf", dtype="fp32")
    (tmp_path / "out" / "model.safetensors").unlink()
    assert run("inspect", tmp_path / "out").status == 0
    assert_refused(run("verify", tmp_path / "out"), 3, "no weights")


@pytest.mark.parametrize(
    "name", ["model-00001-of-00002.safetensors", "model.bin", "model.safetensors.index.json"]
)
def test_weights_that_are_incomplete_are_no_config_alone(alone: Path, name: str) -> None:
    (alone / name).write_text("{}")
    assert run("inspect", alone).status == 3


def test_a_configuration_of_another_name_is_taken_by_the_loaders(
    alone: Path, tmp_path: Path
) -> None:
    named = Path(shutil.copy(alone / "config.json", tmp_path / "llama.json"))
    assert_refused(run("plan", named), 3, "--loader config")
    assert run("plan", named, "--loader", "config") == run("plan", alone)
    named.write_text("{}")
    assert_refused(
        run("plan", named, "--loader", "config"),
        3,
        "llama.json: has neither architectures nor model_type",
    )


def test_no_output_replaces_a_configuration(llama: Path, alone: Path) -> None:
    for target in (alone, alone / "config.json"):
        with unchanged(alone):
            assert_refused(
                run("convert", llama, target, "--saver", "hf", "--overwrite"),
                2,
                "--overwrite replaces",
            )


def test_a_config_json_of_something_else_is_refused_by_name(alone: Path) -> None:
    file = alone / "config.json"
    for words, status, said in (
        ("{", 3, "config.json"),
        ('{"architectures": ["NoSuchModel"]}', 3, "NoSuchModel"),
        ('{"architectures": ["LlamaForCausalLM"]}', 3, "hidden_size"),
        (
            json.dumps(
                json.loads(file.read_text()) | {"quantization_config": {"quant_method": "hqq"}}
            ),
            3,
            "hqq",
        ),
    ):
        file.write_text(words)
        for command in ("inspect", "plan"):
            assert_refused(run(command, file), status, said)
            assert_refused(run(command, alone), status, said)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"torch_dtype": "auto"}, "config.json: dtype 'auto' is not known; expected one such as"),
        ({"dtype": 5}, "config.json: dtype '5' is not known"),
        ({"rms_norm_eps": ["x"] * 99}, "config.json: rms_norm_eps should be a number, found ['x',"),
        ({"architectures": "LlamaForCausalLM"}, "architectures should be a list of class names"),
        ({"architectures": [["x"]]}, "architectures should be a list of class names"),
        ({"model_type": 5}, "config.json: model_type should be a name, found 5"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "rope_scaling: has a value of a wrong kind"),
        (
            {"rms_norm_eps": float("inf")},
            "config.json: the model's norm.epsilon should be a number",
        ),
    ],
)
def test_a_value_that_no_model_has_is_refused_by_the_names_of_file_and_key(
    keys: dict[str, Any], said: str, alone: Path
) -> None:
    file = alone / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))
    for words in (["inspect"], ["plan"], ["plan", "--for", "infer"]):
        outcome = run(*words, file)
        assert_refused(outcome, 3, said, str(alone))
        assert len(outcome.err) < 400


def test_groups_of_layers_are_not_repeated_for_ever() -> None:
    raw = raw_config("gpt_neo", attention_types=[[[], 10**30]])
    with pytest.raises(CorruptCheckpoint, match="should repeat a group at most"):
        family("gpt_neo").read_hf(raw)


def test_a_model_that_sees_is_looked_at_by_its_language_model(tmp_path: Path) -> None:
    create(MODELS["qwen2_5_vl"], tmp_path / "hf")
    file = tmp_path / "hf" / "config.json"
    for command in ("inspect", "plan"):
        assert_refused(
            run(command, file),
            2,
            "Qwen2_5_VLForConditionalGeneration is a multimodal model",
            "--text-only",
        )
    assert run("plan", file, "--text-only") == run("plan", tmp_path / "hf", "--text-only")
    assert run("inspect", file, "--text-only", "--tree") == run(
        "inspect", tmp_path / "hf", "--text-only", "--tree"
    )
    assert (
        megaconv.plan(file, text_only=True).to_json()
        == megaconv.plan(tmp_path / "hf", text_only=True).to_json()
    )
    assert megaconv.inspect(file, text_only=True).header.config.family == "qwen2"


@pytest.mark.parametrize("name", sorted(CONFIG_KEYS))
def test_shapes_are_those_of_the_files_of_every_family(name: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", name)
    found, whole = megaconv.inspect(model / "config.json").header, megaconv.inspect(model).header
    assert {key: info.shape for key, info in found.manifest.items()} == {
        key: info.shape for key, info in whole.manifest.items()
    }


def test_layers_that_predict_further_tokens_count_among_all_experts(tmp_path: Path) -> None:
    words = {
        "num_nextn_predict_layers": 2000,
        "n_routed_experts": 30_000,
        "first_k_dense_replace": 2,
    }
    model = write_model(tmp_path / "model", "deepseek_v3")
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | words))
    assert_refused(run("plan", file), 3, "2,003 layers of 30,000 experts")


def test_a_repository_without_weights(
    alone: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with hub_server.running() as hub:
        hub_server.prepare_client(monkeypatch, hub.address, tmp_path)
        hub.commit(
            "org/name",
            "main",
            {file.name: hub_server.File(file.read_bytes(), lfs=False) for file in alone.iterdir()},
        )
        planned = finish(start("plan", "org/name"))
        assert planned == run("plan", alone)
        assert "without weights" in finish(start("inspect", "hf://org/name")).out

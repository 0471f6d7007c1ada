"""`megaconv average` and `convert --average`: models of any formats and layouts, and what is refused."""

import json
import logging
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import megaconv
from megaconv.errors import UsageError
from megaconv.options.model_shares import ModelShare, divided, model_shares
from tests.conftest import FIXTURES
from tests.engine.averaged_models import weights, write_delta_nets, write_models
from tests.engine.test_interrupted import KILL
from tests.forks import start
from tests.models import write_llama
from tests.runs import assert_refused, finish, run


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_models(tmp_path_factory.mktemp("models"))


def expected(models: list[Path], shares: list[float]) -> dict[str, torch.Tensor]:
    """The average of the models as they were in Hugging Face's format."""
    found = [weights(models[0].parent / f"hf{number}") for number in range(len(models))]
    return {
        name: sum(
            (each[name].double() * share for each, share in zip(found, shares, strict=True)),
            torch.zeros(tensor.shape, dtype=torch.float64),
        )
        for name, tensor in found[0].items()
    }


def assert_average(out: Path, models: list[Path], shares: list[float]) -> None:
    made = weights(out)
    for name, tensor in expected(models, shares).items():
        assert torch.equal(made[name], tensor.to(made[name].dtype)), name


def assert_average_of_two(out: Path, left: Path, right: Path) -> None:
    made, ours, theirs = weights(out), weights(left), weights(right)
    for name, tensor in made.items():
        mean = (ours[name].double() + theirs[name].double()) / 2
        assert torch.equal(tensor, mean.to(tensor.dtype)), name


def test_models_of_three_formats_are_averaged(models: list[Path], tmp_path: Path) -> None:
    outcome = run("average", *models, "--save-dir", tmp_path / "out", "--verify")
    assert outcome.status == 0, outcome.err
    assert_average(tmp_path / "out", models, [1 / 3] * 3)
    shares = ", ".join(f"{model} (0.3333)" for model in models)
    assert f"average of {shares}" in outcome.err


@pytest.mark.parametrize("own", ["", ":0.7"])
def test_the_first_model_has_what_the_shares_of_the_others_leave(
    own: str, models: list[Path], tmp_path: Path
) -> None:
    words = [f"{models[0]}{own}", f"{models[1]}:0.5", f"{models[2]}:-0.2"]
    assert run("average", *words, "--save-dir", tmp_path / "out").status == 0
    assert_average(tmp_path / "out", models, [0.7, 0.5, -0.2])


def test_convert_shards_an_average(models: list[Path], tmp_path: Path) -> None:
    base, *others = models
    options = [word for other in others for word in ("--average", other)]
    assert (
        run("convert", base, tmp_path / "core", *options, "--saver", "core", "--pp", 2).status == 0
    )
    assert run("convert", tmp_path / "core", tmp_path / "hf", "--saver", "hf").status == 0
    assert_average(tmp_path / "hf", models, [1 / 3] * 3)


@pytest.mark.parametrize(
    ("word", "dtype"), [("fp32", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16)]
)
def test_the_average_is_rounded_once_to_the_requested_dtype(
    word: str, dtype: torch.dtype, models: list[Path], tmp_path: Path
) -> None:
    assert run("average", *models, "--save-dir", tmp_path / "out", "--dtype", word).status == 0
    assert {tensor.dtype for tensor in weights(tmp_path / "out").values()} == {dtype}
    assert_average(tmp_path / "out", models, [1 / 3] * 3)


def test_the_python_interface_averages_too(models: list[Path], tmp_path: Path) -> None:
    names = [str(model) for model in models]
    report = megaconv.average([names[0], f"{names[1]}:0.25"], tmp_path / "out")
    assert_average(tmp_path / "out", models[:2], [0.75, 0.25])
    again = megaconv.convert(names[0], tmp_path / "again", saver="hf", average=[f"{names[1]}:0.25"])
    assert again.fingerprint == report.fingerprint
    with pytest.raises(UsageError, match="expected two models or more"):
        megaconv.average(names[:1], tmp_path / "one")


def test_the_record_names_all_models_with_their_fingerprints(
    models: list[Path], tmp_path: Path
) -> None:
    assert run("average", *models, "--save-dir", tmp_path / "out").status == 0
    record = json.loads((tmp_path / "out" / "megaconv.json").read_text())
    inputs = record["provenance"]["inputs"]
    assert [each["as"] for each in inputs] == ["input", "averaged", "averaged"]
    for each, model in zip(inputs[1:], models[1:], strict=True):
        assert each["fingerprint"] == megaconv.fingerprint(model).weights
    assert run("verify", tmp_path / "out").status == 0


def test_optimizer_state_is_left_out_and_refused(tmp_path: Path) -> None:
    trained = FIXTURES / "core-llama-optim-tp2pp2" / "checkpoint"
    words = ["convert", trained, tmp_path / "out", "--saver", "core", "--average", trained]
    assert_refused(run(*words, "--optimizer"), 2, "--optimizer", "--average")
    assert run(*words).status == 0
    assert not megaconv.inspect(tmp_path / "out").header.has_optimizer
    assert megaconv.diff(trained, tmp_path / "out", optimizer=False).same


def test_quantized_models_are_averaged_as_their_weights(tmp_path: Path) -> None:
    plain = write_llama(tmp_path / "plain", hidden=128, ffn=128)
    quantized = tmp_path / "quantized"
    assert run("convert", plain, quantized, "--saver", "hf", "--quantize", "fp8-block").status == 0
    assert run("convert", quantized, tmp_path / "wide", "--saver", "hf").status == 0
    assert run("average", plain, quantized, "--save-dir", tmp_path / "out").status == 0
    assert_average_of_two(tmp_path / "out", plain, tmp_path / "wide")


def test_models_of_other_shapes_or_names_are_refused(models: list[Path], tmp_path: Path) -> None:
    wider = write_llama(tmp_path / "wider", ffn=64)
    outcome = run("average", models[0], wider, "--save-dir", tmp_path / "out")
    assert_refused(outcome, 3, str(wider), "has the shape [64, 32]", "[56, 32]")
    deeper = write_llama(tmp_path / "deeper", layers=5)
    outcome = run("average", models[0], deeper, "--save-dir", tmp_path / "out")
    assert_refused(outcome, 3, str(deeper), "9 tensors are unknown in this model")
    assert not (tmp_path / "out").exists()


def test_adapters_are_refused(tmp_path: Path) -> None:
    case = FIXTURES / "peft-llama-all-linear"
    outcome = run("average", case / "base", case / "adapter", "--save-dir", tmp_path / "out")
    assert_refused(outcome, 3, "adapter: is an adapter", "megaconv merge BASE")


def test_other_settings_are_named(
    models: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = write_llama(tmp_path / "other", extra_config={"rope_theta": 500000.0})
    with caplog.at_level(logging.WARNING):
        megaconv.average([models[0], other], tmp_path / "out")
    assert f"{models[0]} says positions.theta = 10000" in caplog.text
    assert f"{other} says 500000" in caplog.text
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rope_theta"] == 10000.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["A"], "expected two models or more to average"),
        (["A", "B:0.5", "C"], "C: has no share; give one to each of the models, or to none"),
        (["A:0.5", "B:0.3"], "the shares add up to 0.8, expected 1"),
        (["A:0.5", "B"], "B: has no share"),
        (["A", "B:many"], "B:many: write MODEL or MODEL:SHARE"),
    ],
)
def test_wrong_shares_are_one_line(words: list[str], message: str, tmp_path: Path) -> None:
    for word in words:
        write_llama(tmp_path / word[0])
    places = [f"{tmp_path}/{word}" for word in words]
    outcome = run("average", *places, "--save-dir", tmp_path / "out")
    assert_refused(outcome, 2, *message.split(": ")[-1:])
    assert not (tmp_path / "out").exists()


def test_words_with_shares_are_read() -> None:
    words = ["org/model", "s3://bucket/model:0.25", Path("model"), ModelShare("x", 0.5)]
    assert model_shares(words) == (
        ModelShare("org/model"),
        ModelShare("s3://bucket/model", 0.25),
        ModelShare("model"),
        ModelShare("x", 0.5),
    )
    assert divided(model_shares(["a", "b:0.5"])) == ("a", (ModelShare("b", 0.5),))


@pytest.mark.parametrize("second", [1, 2], ids=["the same models", "another model"])
def test_an_output_after_a_kill_is_no_mixture(
    second: int, models: list[Path], tmp_path: Path
) -> None:
    def words(number: int) -> list[object]:
        return ["average", models[0], models[number], "--save-dir", tmp_path / "out", "--resume"]

    kill = KILL.format(owner="FileTensor", name="read_into", number=60, journaled="pass")
    killed = finish(start(*words(1), before=kill))
    assert killed.status == -signal.SIGKILL, killed
    assert not (tmp_path / "out").exists()
    again = run(*words(second))
    assert again.status == 0, again.err
    assert_average_of_two(tmp_path / "out", models[0].parent / f"hf{second}", models[0])


def test_a_model_that_is_averaged_is_not_replaced(models: list[Path], tmp_path: Path) -> None:
    other = write_llama(tmp_path / "other", seed=5)
    outcome = run("average", models[0], other, "--save-dir", other, "--overwrite")
    assert outcome.status != 0
    assert weights(other).keys() == weights(models[0]).keys()


def test_a_tied_and_an_untied_model_are_no_models_of_one_kind(tmp_path: Path) -> None:
    tied, untied = write_llama(tmp_path / "tied", tied=True), write_llama(tmp_path / "untied")
    outcome = run("average", tied, untied, "--save-dir", tmp_path / "out")
    assert_refused(outcome, 3, str(untied), "unknown in this model: head.weight")


def test_a_model_without_a_family_is_averaged_under_its_own_names(tmp_path: Path) -> None:
    for number in range(2):
        place = tmp_path / f"model{number}"
        place.mkdir()
        config = {"model_type": "unheard_of", "architectures": ["UnheardOfForCausalLM"]}
        (place / "config.json").write_text(json.dumps(config))
        tensor = torch.full((4, 6), float(number), dtype=torch.float32)
        save_file({"some.weight": tensor}, place / "model.safetensors", {"format": "pt"})
    outcome = run("average", tmp_path / "model0", tmp_path / "model1", "--save-dir", tmp_path / "o")
    assert outcome.status == 0, outcome.err
    assert torch.equal(weights(tmp_path / "o")["some.weight"], torch.full((4, 6), 0.5))


@pytest.fixture(scope="module")
def delta_nets(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_delta_nets(tmp_path_factory.mktemp("delta-nets"))


@pytest.mark.parametrize(
    "pair", [(2, 3), (0, 3), (3, 0)], ids=["both shifted", "one shifted", "the first shifted"]
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_norms_that_are_stored_minus_1_are_averaged_as_they_multiply(
    dtype: str, pair: tuple[int, int], delta_nets: list[Path], tmp_path: Path
) -> None:
    left, right = (delta_nets[number] for number in pair)
    plain = [delta_nets[number % 2] for number in pair]
    options = ["--dtype", dtype]
    outcome = run("average", left, right, "--save-dir", tmp_path / "out", *options)
    assert outcome.status == 0, outcome.err
    assert run("average", *plain, "--save-dir", tmp_path / "plain", *options).status == 0
    assert megaconv.diff(tmp_path / "out", tmp_path / "plain").same


def test_an_average_keeps_the_stored_form_of_its_norms(
    delta_nets: list[Path], tmp_path: Path
) -> None:
    _, _, left, right = delta_nets
    words = ["convert", left, tmp_path / "core", "--average", right, "--saver", "core"]
    assert run(*words, "--transformer-impl", "transformer_engine").status == 0
    assert run("average", left, right, "--save-dir", tmp_path / "hf").status == 0
    assert megaconv.diff(tmp_path / "core", tmp_path / "hf").same

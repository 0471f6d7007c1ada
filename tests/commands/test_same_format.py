"""A Megatron checkpoint at another layout without `--saver`: as Megatron's own tools do it, in the format that it has."""

import shutil
from pathlib import Path

import pytest

import megaconv
from formats import rank_files
from formats.torch_dist import read_backend
from tests.conftest import FIXTURES
from tests.families.test_families import write_model
from tests.models import write_llama
from tests.runs import assert_refused, run

REAL = {
    "core-llama-tp2pp2": "torch",
    "core-te-llama-tp2pp2": "torch",
    "core-llama-optim-tp2pp2": "torch",
    "core-te-mixtral-grouped-tp2ep2": "torch",
    "core-bert-tp2pp2": "torch",
    "zarr-llama-tp2pp2": "zarr",
    "dist-llama-tp2pp2": "torch_dist",
    "dist-mixtral-tp2ep2": "torch_dist",
    "legacy-llama-tp2pp2": "torch",
}
MISSING = "--saver is missing; it names the output format. Choose one of core, legacy"


def checkpoint(name: str) -> Path:
    inside = FIXTURES / name / "checkpoint"
    return inside if inside.is_dir() else FIXTURES / name


def of_saved(path: Path) -> tuple[str, str]:
    """(format, which names and modules its tensors have)."""
    version = rank_files.find_version(path)
    assert version is not None
    header = megaconv.open(path).header
    impl = header.training.arguments["transformer_impl"]
    return (
        read_backend(version) or "torch",
        f"{header.source}, {impl}, grouped {header.training.arguments['moe_grouped_gemm']}",
    )


@pytest.mark.parametrize("name", REAL)
def test_a_real_checkpoint_keeps_its_format_and_its_names(tmp_path: Path, name: str) -> None:
    source = checkpoint(name)
    outcome = run("convert", source, tmp_path / "out", "--tp", 1, "--pp", 1)
    assert (outcome.status, outcome.err) == (0, outcome.err)
    assert of_saved(tmp_path / "out") == of_saved(source)
    assert of_saved(source)[0] == REAL[name]
    assert (
        megaconv.open(tmp_path / "out").layout.tp,
        megaconv.open(tmp_path / "out").layout.pp,
    ) == (1, 1)
    assert megaconv.fingerprint(tmp_path / "out").weights == megaconv.fingerprint(source).weights


@pytest.mark.parametrize(
    "sizes",
    [
        ["--target-tensor-parallel-size", 1],
        ["--target-pipeline-parallel-size", 1],
        ["--tp", 1],
        ["--pp", 1],
        ["--pp", 2, "--layer-split", "1,3"],
    ],
    ids=str,
)
def test_sizes_in_either_spelling_are_enough(tmp_path: Path, sizes: list[object]) -> None:
    megaconv.convert(write_llama(tmp_path / "hf"), tmp_path / "in", saver="core", tp=2, pp=2)
    outcome = run("convert", "--load-dir", tmp_path / "in", "--save-dir", tmp_path / "out", *sizes)
    assert outcome.status == 0, outcome.err
    assert of_saved(tmp_path / "out") == of_saved(tmp_path / "in")


def test_a_conversion_to_the_same_format_applies_the_other_options(tmp_path: Path) -> None:
    source = checkpoint("core-llama-tp2pp2")
    others = ("--ckpt-format", "torch_dist", "--transformer-impl", "transformer_engine")
    assert run("convert", source, tmp_path / "out", "--tp", 1, *others).status == 0
    found = of_saved(tmp_path / "out")
    assert found[0] == "torch_dist"
    assert "transformer_engine" in found[1]


@pytest.mark.parametrize("sizes", [[], ["--ckpt-format", "torch"], ["--dtype", "bf16"]], ids=str)
def test_without_sizes_a_saver_is_needed(tmp_path: Path, sizes: list[object]) -> None:
    assert_refused(
        run("convert", checkpoint("core-llama-tp2pp2"), tmp_path / "out", *sizes), 2, MISSING
    )


def test_any_other_input_needs_a_saver(tmp_path: Path) -> None:
    hf = write_llama(tmp_path / "hf")
    megaconv.convert(
        hf,
        tmp_path / "bridge",
        saver="core",
        ckpt_format="torch_dist",
        options={"for": "megatron-bridge"},
    )
    megaconv.convert(hf, tmp_path / "dcp", saver="dcp")
    for source in (
        hf,
        tmp_path / "bridge",
        tmp_path / "dcp",
        FIXTURES / "deepspeed-zero2-llama-tied-groups-dp2" / "checkpoint",
    ):
        if source.is_dir():
            assert_refused(run("convert", source, tmp_path / "out", "--tp", 2), 2, MISSING)
    assert not (tmp_path / "out").exists()


def test_a_missing_input_is_reported(tmp_path: Path) -> None:
    assert_refused(run("convert", tmp_path / "nothing", tmp_path / "out", "--tp", 2), 2, "no such")


def test_the_directory_around_a_checkpoint_is_reported_before_the_missing_saver(
    tmp_path: Path,
) -> None:
    shutil.copytree(checkpoint("core-llama-tp2pp2"), tmp_path / "run" / "checkpoint")
    outcome = run("convert", tmp_path / "run", tmp_path / "out", "--tp", 1)
    assert_refused(outcome, 3, "is no checkpoint itself", str(tmp_path / "run" / "checkpoint"))


def test_a_layout_that_can_not_be_is_refused_as_with_a_saver(tmp_path: Path) -> None:
    source = checkpoint("core-llama-tp2pp2")
    with_saver = run("convert", source, tmp_path / "out", "--tp", 3, "--saver", "core")
    without = run("convert", source, tmp_path / "out", "--tp", 3)
    assert (without.status, without.err) == (with_saver.status, with_saver.err)
    assert without.status == 2


# What Megatron's own command says besides.


@pytest.mark.parametrize(
    ("name", "model_type"),
    [
        ("core-t5-tp2pp1", "T5"),
        pytest.param("core-bert-tp2pp2", "BERT", marks=pytest.mark.slow),
        pytest.param("core-gpt2-tp2pp2", "GPT", marks=pytest.mark.slow),
    ],
)
def test_a_type_of_model_that_is_true_is_accepted_and_any_other_refused(
    tmp_path: Path, name: str, model_type: str
) -> None:
    sizes = ("--target-tensor-parallel-size", 1, "--target-pipeline-parallel-size", 1)
    for said in ("GPT", "BERT", "T5"):
        for dry in ((), ("--dry-run",)):
            outcome = run(
                "convert", checkpoint(name), tmp_path / "out", "--model-type", said, *sizes, *dry
            )
            if said == model_type:
                assert outcome.status == 0, outcome.err
                shutil.rmtree(tmp_path / "out", ignore_errors=True)
            else:
                assert_refused(outcome, 2, f"--model-type {said}: the model is a {model_type}")
                assert not (tmp_path / "out").exists()


def test_the_type_is_that_of_the_model_and_not_of_its_format(tmp_path: Path) -> None:
    hf = write_model(tmp_path / "bert", "bert")
    assert (
        run(
            "convert", hf, tmp_path / "out", "--saver", "core", "--model-type", "BERT", "--dry-run"
        ).status
        == 0
    )

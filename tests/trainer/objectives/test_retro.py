"""Retro's training on a project of megatron-core 0.15.3: samples with neighbors, runs, and retrieval added to a GPT."""

import json
import shutil
from pathlib import Path

import pytest
from numpy.testing import assert_array_equal

import megaconv
from megaconv.engine.conversion import fingerprint
from megaconv.errors import UsageError
from megaconv.model.ir import WEIGHT
from megatron_lite.data.samples import SampleForm
from megatron_lite.objectives.retro import RetroDataset
from megatron_lite.objectives.retro_project import with_project
from megatron_lite.retrieval.retro.project import open_project
from megatron_lite.settings.arguments import parse
from tests.trainer.loop.launches import launch, train
from tests.trainer.retrieval.retro_fixture import EOD, INFO, expected, megatrons_project

pytest.importorskip("h5py")

MODEL = (
    "--num-layers 6 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 32 --make-vocab-size-divisible-by 1 "
    "--attention-dropout 0 --hidden-dropout 0 --retro-encoder-hidden-dropout 0 --retro-encoder-attention-dropout 0"
)
TRAINING = "--micro-batch-size 4 --train-iters 2 --lr 1e-3 --log-interval 1 --retro-project-dir P"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    project = megatrons_project(tmp_path / "P")
    config = json.loads((project / "config.json").read_text())
    (project / "config.json").write_text(json.dumps(config | {"retro_gpt_vocab_size": 63}))
    return tmp_path


@pytest.mark.parametrize("split", ["train", "valid"])
def test_samples_are_those_of_megatron_cores_dataset(place: Path, split: str) -> None:
    project, wanted = open_project(place / "P"), expected()
    windows, near = project.windows(split), project.neighbors(split)
    assert windows is not None
    dataset = RetroDataset(
        windows, SampleForm(EOD), project.database(EOD), near,
        INFO["retro_num_neighbors"], INFO["retro_num_retrieved_chunks"], megatron=True,
    )  # fmt: skip
    assert len(dataset) == INFO["samples"][split]
    for index in range(len(dataset)):
        sample = dataset[index]
        text = wanted[f"samples/{split}/text"][index]
        assert_array_equal(sample.tokens, text[:-1])
        assert_array_equal(sample.labels, text[1:])
        assert_array_equal(
            sample.neighbor_tokens, wanted[f"samples/{split}/neighbor_tokens"][index]
        )


@pytest.mark.slow
def test_a_retro_trains_on_a_project_saves_and_continues(place: Path) -> None:
    words = f"pretrain {MODEL} {TRAINING} --retro-add-retriever --save {{}} --ckpt-format {{}}"
    for name, form in (("whole", "torch_dist"), ("parts", "torch")):
        train(place, 1, words.format(name, form))
    assert megaconv.fingerprint(place / "whole") == megaconv.fingerprint(place / "parts")
    config = megaconv.open(place / "whole").config
    assert config.family == "retro"
    assert (config.retrieval.chunk, config.retrieval.neighbors, config.retrieval.chunks) == (
        8,
        2,
        2,
    )
    train(place, 1, f"{words.format('whole', 'torch_dist')} --resume --train-iters 3")
    assert megaconv.open(place / "whole").header.training.iteration == 3


def test_a_gpt_on_the_same_data_gets_retrieval_and_stays_the_same_with_a_gate_of_zero(
    place: Path,
) -> None:
    train(place, 1, f"pretrain {MODEL} {TRAINING} --save gpt")
    fit = f"pretrain {TRAINING} --load gpt --finetune --retro-add-retriever --lr 0 --save {{}}"
    train(place, 1, fit.format("fitted"))
    gpt, fitted = megaconv.open(place / "gpt"), megaconv.open(place / "fitted")
    assert fitted.config.family == "retro"
    for name in gpt.tensors:
        assert bool((gpt.load(name) == fitted.load(name)).all()), name
    megaconv.convert(place / "fitted", place / "inside", saver="hf", drop_retrieval=True)
    megaconv.convert(place / "gpt", place / "plain", saver="hf")
    assert megaconv.fingerprint(place / "inside") == megaconv.fingerprint(place / "plain")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--seq-length 64", "--seq-length 64 contradicts the project P, which has 32"),
        ("--data-path x", "--data-path: the data are those of P"),
        ("--train-iters 9", "the query made 96 chunks, the run needs 288"),
        ("--num-layers 5", "layer 6 is the first with retrieval; --num-layers 5 has none"),
        ("--context-parallel-size 2", "--context-parallel-size is not supported with --retro-project-dir"),
        ("--retro-chunk-length 4", "--retro-chunk-length 4 contradicts the project P, which has 8"),
    ],
)  # fmt: skip
def test_flags_that_contradict_a_project_are_refused(
    words: str, message: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    settings, _ = parse("pretrain", f"{TRAINING} --retro-add-retriever {words}".split())
    with pytest.raises(UsageError, match=message):
        with_project(settings)


def test_samples_without_neighbors_end_the_run_with_one_line(place: Path) -> None:
    for of_split in (place / "P" / "query").glob("train_*"):
        shutil.rmtree(of_split)
    running = launch(place, 1, f"pretrain {MODEL} {TRAINING} --retro-add-retriever")
    assert running.wait() == [3]
    said = running.logs()
    assert "has no neighbours; finish `megatron-lite retro build`" in said
    assert "Traceback" not in said


def test_neighbors_need_a_project() -> None:
    settings, _ = parse("pretrain", ["--retro-add-retriever", "--mock-data", "--train-iters", "1"])
    with pytest.raises(UsageError, match="--retro-add-retriever requires --retro-project-dir"):
        with_project(settings)


@pytest.mark.slow
@pytest.mark.parametrize("ckpt_format", ["torch_dist", "torch"])
def test_instruct_retro_is_tuned_with_a_gate_of_zero_and_continues(
    ckpt_format: str, place: Path
) -> None:
    """The rest stays as it is, without optimizer state, in both formats and at another layout too."""
    train(place, 1, f"pretrain {MODEL} {TRAINING} --retro-add-retriever --save retro")
    records = [{"prompt": "1 2 3", "completion": "4 5"}] * 8
    (place / "asked.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    tune = (
        "finetune --load retro --finetune-data asked.jsonl --retro-attention-gate 0 --epochs {} --global-batch-size 2 "
        "--seq-length 16 --lr 1e-3 --attention-dropout 0 --hidden-dropout 0 --save tuned --resume"
    )
    steps = []
    for epochs in (1, 2):
        train(place, 1, f"{tune.format(epochs)} --ckpt-format {ckpt_format}")
        steps.append(megaconv.open(place / "tuned").header.training.iteration)
    assert steps == [2, 3]
    retro, tuned = megaconv.open(place / "retro"), megaconv.open(place / "tuned")
    for name in retro.tensors:
        kept = bool((retro.load(name) == tuned.load(name)).all())
        assert kept == is_of_retrieval(name), name
    with_state = {key.name for key in fingerprint(place / "tuned").tensors if key.slot != WEIGHT}
    assert with_state == {name for name in tuned.tensors if not is_of_retrieval(name)}
    for form in ("torch", "torch_dist"):
        megaconv.convert(place / "tuned", place / form, saver="core", ckpt_format=form, tp=2)
        assert fingerprint(place / form) == fingerprint(place / "tuned")


def is_of_retrieval(name: str) -> bool:
    return name.startswith("retriever.") or ".cross" in name

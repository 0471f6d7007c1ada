"""The args of a checkpoint are compared with its tensors, with and without a config.json beside them.

Each argument that is read gets other values, in a checkpoint with hf/config.json and in the same one without. What is refused
or another model without it has to be refused, or named, with it.
"""

import logging
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import loaders.core
import megaconv
from formats import torch_zip
from megaconv.checkpoint import open_checkpoint
from megaconv.errors import CheckpointError, TensorMismatch
from megaconv.megatron.arguments.known import READ
from megaconv.megatron.rank_files.source import RankSource
from megaconv.model.config import ModelConfig
from megaconv.model.meaning import config_differences
from megaconv.options import LoadOptions
from tests.families.test_families import write_model
from tests.rank_states import edit, rank_paths

FAST, SLOW = (
    ("llama",),
    ("deepseek_v32", "qwen3_next", "nemotron_h", "glm4_moe", "gpt_oss", "gemma2", "minimax_m2"),
)


class Pair(NamedTuple):
    """The same checkpoint."""

    beside: Path
    """The checkpoint with hf/config.json."""
    alone: Path


class Outcome(NamedTuple):
    error: str
    """Empty where the checkpoint is read."""
    config: ModelConfig | None
    log: str


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    made: dict[str, Pair] = {}

    def pair(family: str) -> Pair:
        if family not in made:
            root = tmp_path_factory.mktemp(family)
            megaconv.convert(write_model(root / "hf", family), root / "beside", saver="core")
            (root / "beside" / "megaconv.json").unlink()
            shutil.copytree(root / "beside", root / "alone", ignore=shutil.ignore_patterns("hf"))
            made[family] = Pair(root / "beside", root / "alone")
        return made[family]

    return pair


@pytest.fixture
def opened(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Callable[..., Outcome]:
    """Opens a checkpoint whose args state other values."""
    real = loaders.core.open_ranks
    stated: dict[str, Any] = {}

    def open_ranks(path: Path, options: LoadOptions, *, legacy: bool) -> RankSource:
        source = real(path, options, legacy=legacy)
        return replace(source, args=Namespace(**vars(source.args) | stated))

    monkeypatch.setattr(loaders.core, "open_ranks", open_ranks)

    def read(path: Path, **values: Any) -> Outcome:
        stated.clear()
        stated.update(values)
        caplog.clear()
        try:
            with caplog.at_level(logging.WARNING, "megaconv"):
                return Outcome("", open_checkpoint(path).config, caplog.text)
        except CheckpointError as error:
            return Outcome(str(error), None, caplog.text)

    return read


def other_values(value: object) -> Iterator[object]:
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (2 * value + 1, value + 1)
    elif isinstance(value, float):
        yield 2 * value + 0.25


@pytest.mark.parametrize(
    "family", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_no_stated_argument_is_silently_lost_beside_a_config_json(
    family: str, pair_of: Callable[[str], Pair], opened: Callable[..., Outcome]
) -> None:
    pair = pair_of(family)
    whole, original = opened(pair.beside), opened(pair.alone)
    assert (whole.error, whole.log) == (original.error, original.log) == ("", "")
    assert original.config is not None
    (file,) = rank_paths(pair.beside)
    args = vars(torch_zip.read(file)["args"])  # type: ignore[index]
    for name in sorted(READ):
        for value in other_values(args.get(name)):
            beside, alone = (
                opened(pair.beside, **{name: value}),
                opened(pair.alone, **{name: value}),
            )
            same = alone.config is not None and not config_differences(
                original.config, alone.config
            )
            assert beside.error or beside.log or (same and not alone.log), (name, value, alone)


def test_an_output_gate_that_the_rows_of_q_contradict_is_refused_alike_with_and_without_a_config_json(
    pair_of: Callable[[str], Pair], opened: Callable[..., Outcome]
) -> None:
    for family in ("llama", "deepseek_v32"):
        refused = [opened(path, attention_output_gate=True).error for path in pair_of(family)]
        assert refused[0] == refused[1]
        assert "its args have attention_output_gate, which makes " in refused[0]


def test_a_config_that_was_asked_for_wins_over_args_that_the_tensors_contradict(
    pair_of: Callable[[str], Pair], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = shutil.copytree(pair_of("llama").beside, tmp_path / "wrong")
    expected = open_checkpoint(path).config
    edit(rank_paths(path), args={"attention_output_gate": True, "kv_channels": 6})
    with pytest.raises(TensorMismatch):
        open_checkpoint(path)
    assert open_checkpoint(path, LoadOptions(config=path / "hf")).config == expected
    for words in (
        "attention.output_gate = False",
        "attention.head_dim = 3",
        "say 6; --config wins",
    ):
        assert words in caplog.text


@pytest.mark.parametrize(
    ("argument", "value", "shown"),
    [
        ("qk_layernorm", True, "attention.qk_norm = False"),
        ("ffn_hidden_size", 16, "mlp.ffn = 8"),
        ("untie_embeddings_and_output_weights", False, "an untied head"),
    ],
)
def test_an_argument_that_tensors_contradict_is_named(
    argument: str,
    value: object,
    shown: str,
    pair_of: Callable[[str], Pair],
    opened: Callable[..., Outcome],
) -> None:
    for path in pair_of("llama"):
        outcome = opened(path, **{argument: value})
        assert (
            f"the checkpoint's {argument} is {value!r}, its tensors show {shown}; the tensors win"
            in outcome.log
        )
        assert outcome.config == opened(path).config


def test_a_vocabulary_of_the_run_that_config_json_contradicts_is_named(
    pair_of: Callable[[str], Pair], opened: Callable[..., Outcome]
) -> None:
    outcome = opened(pair_of("llama").beside, vocab_size=23)
    assert (
        "config.json says a vocabulary of 19, the arguments of the run that saved the checkpoint say 23"
        in outcome.log
    )
    assert "--true-vocab-size 23" in outcome.log
    assert outcome.config is not None
    assert outcome.config.vocab == 19

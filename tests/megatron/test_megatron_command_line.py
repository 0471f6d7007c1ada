"""`inspect --megatron-args`: flags that real releases of Megatron-LM parse, and that lead back to the same model."""

import json
import shlex
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from megaconv.families import families
from megaconv.megatron.arguments.command_line import CommandLine, command_line, known_flags
from megaconv.megatron.arguments.read import from_arguments
from megaconv.model.config import ModelConfig
from tests.config_models import LLAMA, configs, found_in_tensors
from tests.conftest import FIXTURES
from tests.megatron.test_megatron_args import arguments
from tests.megatron_flags import FILE, parser_of
from tests.models import write_llama
from tests.runs import assert_refused, run

RELEASES: dict[str, dict[str, Any]] = json.loads(FILE.read_text())
NEWEST, INSTALLED = "core_v0.19.0", "core_v0.16.1"


NO_CAPS = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
"""The values that the code which builds a Gemma 2 sets if nobody else does."""


def parsed(release: str, found: CommandLine) -> Namespace:
    """The arguments that the parser of a Megatron-LM release returns, with the values that no flag sets."""
    args = parser_of(RELEASES[release]).parse_args(found.words)
    return Namespace(**NO_CAPS | vars(args) | dict(found.unsettable))


def test_every_flag_is_one_of_some_release() -> None:
    assert known_flags() == set().union(*RELEASES.values())


@pytest.mark.parametrize("release", [INSTALLED, NEWEST])
def test_a_model_of_any_family_comes_back_from_its_flags(release: str) -> None:
    @given(configs())
    @settings(max_examples=60, deadline=None)
    def models(config: ModelConfig) -> None:
        recognized = families()[config.family].recognized
        family = None if recognized and config.has(recognized) else config.family
        args = parsed(release, command_line(arguments(config)))
        assert from_arguments(args, found_in_tensors(config), family=family) == config

    models()


@pytest.mark.parametrize("release", RELEASES)
def test_every_release_parses_the_flags_of_a_llama(release: str) -> None:
    args = parsed(release, command_line(arguments(LLAMA)))
    assert from_arguments(args, found_in_tensors(LLAMA)) == LLAMA


@pytest.mark.parametrize(
    "name",
    [
        "core-llama-optim-tp2pp2", "core-gpt2-tp2pp2", "core-mixtral-seq-tp2pp2ep2", "core-qwenlike-tp2pp1",
        "core-llama-tp1pp2-layout", "core-llama-tp2pp2vpp2", "legacy-gpt2-tp2pp2", "core-bert-tp2pp2",
    ],
)  # fmt: skip
def test_the_flags_of_a_real_checkpoint_are_those_of_the_run_that_saved_it(name: str) -> None:
    root = FIXTURES / name / "checkpoint"
    outcome = run("inspect", root, "--megatron-args")
    assert outcome.status == 0
    release = "core_v0.15.3" if name.startswith("legacy") else INSTALLED
    args = parser_of(RELEASES[release]).parse_args(
        [word for line in outcome.out.splitlines() for word in shlex.split(line)]
    )
    known = json.loads(run("inspect", root, "--json").out)
    assert args.load == str(root.resolve())
    assert (args.num_layers, args.hidden_size) == (
        known["config"]["layers.count"],
        known["config"]["hidden"],
    )
    for name, size in (("tensor", "tp"), ("pipeline", "pp"), ("expert", "ep")):
        assert getattr(args, f"{name}_model_parallel_size") in (known["layout"][size], None)
    multiple = args.make_vocab_size_divisible_by * known["layout"]["tp"]
    for of_tokenizer in (args.vocab_size, args.vocab_size + 1):
        # Core 0.18 and later, and earlier releases.
        assert -(-of_tokenizer // multiple) * multiple == known["padded_vocab"]


def test_a_tokenizer_beside_the_checkpoint_is_named_wherever_the_run_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_llama(tmp_path / "a model", layers=2)
    (model / "tokenizer.json").write_text("{}")
    run("convert", "--load-dir", model, "--saver", "core", "--save-dir", tmp_path / "my ckpt")
    monkeypatch.chdir(tmp_path)
    outcome = run("inspect", "my ckpt", "--megatron-args")
    words = [word for line in outcome.out.splitlines() for word in shlex.split(line)]
    assert words[words.index("--tokenizer-type") + 1] == "HuggingFaceTokenizer"
    assert words[words.index("--tokenizer-model") + 1] == str(tmp_path / "my ckpt" / "hf")
    assert "NullTokenizer" not in outcome.out
    assert all(line.startswith("--") for line in outcome.out.splitlines())


def test_arguments_without_a_flag_are_named() -> None:
    found = command_line(
        {"position_embedding_type": "yarn", "yarn_beta_fast": 32.0, "rotary_base": 10000.5}
    )
    assert dict(found.unsettable) == {
        "position_embedding_type": "yarn", "yarn_beta_fast": 32.0, "rotary_base": 10000.5,
    }  # fmt: skip
    assert found.flags == ()


def test_a_model_that_isnt_megatrons_yet_has_flags_without_load(tmp_path: Path) -> None:
    outcome = run("inspect", write_llama(tmp_path / "model", layers=2), "--megatron-args")
    assert outcome.status == 0
    assert "--load" not in outcome.out
    assert "convert it first" in outcome.err
    assert_refused(
        run("inspect", FIXTURES / "peft-llama-all-linear" / "adapter", "--megatron-args"),
        2,
        "adapter",
    )

"""Each flag of Megatron core 0.19's parser is a setting here, has no effect, or is refused with what to do."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from megaconv.errors import UsageError
from megatron_lite.settings.architecture import with_layers
from megatron_lite.settings.arguments import parse
from megatron_lite.settings.config import flags
from megatron_lite.settings.earlier_flags import REPLACED, TODAY
from megatron_lite.settings.megatron_flags import (
    ANY_NUMBER,
    NOT_YET,
    REFUSED,
    WITHOUT_EFFECT,
    refused_feature,
)
from megatron_lite.settings.unknown_flags import YAML_FLAGS
from tests.conftest import FIXTURES
from tests.megatron_oracle import installed_minor

OF_CORE: dict[str, Any] = json.loads((FIXTURES / "flags_of_core_0.19.json").read_text())
"""Flag -> number of its values, or `*`. Read from megatron-core 0.19.2 by the test below."""


def name_of(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def is_taken(flag: str) -> bool:
    name = name_of(flag)
    return (
        name in flags()
        or name in WITHOUT_EFFECT
        or name in NOT_YET
        or flag in (*TODAY, *YAML_FLAGS)
    )


def test_each_flag_has_an_answer() -> None:
    answered = [
        flag
        for flag in OF_CORE
        if is_taken(flag) or flag in REPLACED or refused_feature(name_of(flag))
    ]
    assert set(OF_CORE) - set(answered) == set()


def test_no_flag_has_two_answers() -> None:
    tables = [
        set(flags()),
        set(WITHOUT_EFFECT),
        set(NOT_YET),
        set(REFUSED),
        {name_of(flag) for flag in (*TODAY, *REPLACED)},
    ]
    assert sum(map(len, tables)) == len(set.union(*tables))


def test_flags_without_effect_have_as_many_values_as_in_core() -> None:
    counts = {"*": ANY_NUMBER}
    found = {
        flag: WITHOUT_EFFECT[name_of(flag)] for flag in OF_CORE if name_of(flag) in WITHOUT_EFFECT
    }
    assert found == {flag: counts.get(OF_CORE[flag], OF_CORE[flag]) for flag in found}


@pytest.mark.oracle
@pytest.mark.skipif(
    installed_minor() < 19, reason="the list is of core 0.19: make test-core compares it"
)
def test_the_list_is_that_of_cores_parser() -> None:
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    assert {
        flag: {None: 1, 0: 0}.get(action.nargs, "*")
        for action in parser._actions
        for flag in action.option_strings
        if flag.startswith("--") and flag != "--help"
    } == OF_CORE


OWN_DEFAULTS = {
    "--attention-backend": "core has an enumeration",
    "--data-parallel-sharding-strategy": "core's is for its FSDP alone",
    "--decoder-seq-length": "T5 needs one",
    "--distributed-backend": "it follows from the device",
    "--eval-interval": "core 0.16 had 1000; core 0.19 has no evaluations without the flag",
    "--micro-batch-size": "core demands the flag",
    "--moe-layer-freq": "experts in every layer, in other words",
    "--moe-token-dispatcher-type": "both have the same results",
    "--moe-z-loss-coeff": "0 is no loss, as None",
    "--profile-ranks": "core 0.16 had rank 0",
    "--vocab-extra-ids": "T5 needs them",
}
"""Flags whose default is not core's -> the reason."""


def as_words(default: Any) -> Any:
    """A default in one form: several flags take a list here and one word in core, or the other way round."""
    listed = list(default) if isinstance(default, list | tuple) else [default]
    return [None if each is False else each for each in listed] or [None]


@pytest.mark.oracle
@pytest.mark.skipif(
    installed_minor() < 19, reason="the defaults are of core 0.19: make test-core compares them"
)
def test_defaults_are_those_of_cores_parser() -> None:
    """A run with Megatron-LM's command line has the same settings without words for them."""
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    differing = set()
    for action in parser._actions:
        negated = isinstance(action, argparse._StoreFalseAction)
        theirs = not action.default if negated else action.default
        for flag in set(action.option_strings) & {f"--{n.replace('_', '-')}" for n in flags()}:
            _, ours = flags()[name_of(flag)]
            if as_words(ours.default) != as_words(theirs):
                differing.add(flag)
    assert differing == OWN_DEFAULTS.keys()


def test_all_flags_that_cannot_be_taken_are_named_at_once() -> None:
    words = "--use-mup --fim-rate 0.5 --lr 1e-3 --tp-comm-overlap-cfg x --no-such-flag 1 2"
    words += " --iterations-to-skip 1 2"
    with pytest.raises(UsageError) as raised:
        parse("pretrain", words.split())
    assert str(raised.value) == (
        "4 flags can't be taken. --use-mup: this way of initial weights is not supported yet; leave it out. "
        "--fim-rate: fill in the middle is not supported yet; leave it out. "
        "unknown flag --no-such-flag; --help-all lists all flags. "
        "--iterations-to-skip: leaving out or watching single steps is not supported yet; leave it out"
    )


def test_several_flags_with_other_words_here_are_named_at_once() -> None:
    with pytest.raises(
        UsageError,
        match=r"(?s)2 flags.*--ckpt-step: give .*--load run.*--use-megatron-fsdp: leave it out, and give",
    ):
        parse("pretrain", ["--ckpt-step", "100", "--use-megatron-fsdp"])


def test_a_pattern_has_its_newer_name_too_and_gives_the_number_of_layers() -> None:
    found, _ = parse(
        "pretrain", ["--hybrid-layer-pattern", "M*-M", "--use-rotary-position-embeddings"]
    )
    assert found.model.hybrid_override_pattern == "M*-M"
    assert found.model.position_embedding_type == "rope"
    assert with_layers(found).model.num_layers == 4


@pytest.mark.parametrize(
    "words",
    [
        "--use-checkpoint-opt_param-scheduler",
        "--allow-ambiguous-pad-tokens",
        "--exit-signal SIGUSR1",
        "--mid-level-dataset-surplus 0.1",
        "--fp8-quantizer-factory my.factory",
        "--verify-integrity",
        "--use-mp-args-from-checkpoint-args",
    ],
)
def test_flags_that_would_change_a_run_are_refused(words: str) -> None:
    with pytest.raises(UsageError, match="is not supported yet; leave it out"):
        parse("pretrain", words.split())


def test_a_mask_that_megatron_would_not_make_is_refused(tmp_path: Path) -> None:
    words = ["--reset-attention-mask", "--no-create-attention-mask-in-dataloader"]
    in_file = tmp_path / "run.yaml"
    in_file.write_text("no_create_attention_mask_in_dataloader: true\n")
    for given in (words, [words[0], "--config-file", str(in_file)]):
        with pytest.raises(UsageError, match="separates documents by a mask that Megatron"):
            parse("pretrain", given)
    in_file.write_text("no_create_attention_mask_in_dataloader: false\n")
    _, ignored = parse("pretrain", [words[0], "--config-file", str(in_file)])
    assert ignored == []
    assert parse("pretrain", words[1:])[1] == words[1:]


def test_a_vocabulary_without_padding_is_asked_for_by_its_newer_flag_too() -> None:
    found, _ = parse("pretrain", ["--no-pad-vocab-size"])
    assert found.model.make_vocab_size_divisible_by == 1

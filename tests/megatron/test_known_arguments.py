"""Every argument of every Megatron is read, harmless, or refused unless it is off: the lists against the real software."""

import ast
import dataclasses
import importlib.metadata
import importlib.util
import json
import logging
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from megaconv.checkpoint import open_checkpoint
from megaconv.errors import UnknownFamily
from megaconv.megatron.arguments.beyond_core import QK_NORM_WIDTH, UNPREDICTED
from megaconv.megatron.arguments.check import check_arguments
from megaconv.megatron.arguments.harmless import HARMLESS
from megaconv.megatron.arguments.known import LIMITED, READ, REFUSED, Limit
from megaconv.megatron.arguments.latent import LATENT_NORM_EPSILON
from megaconv.megatron.arguments.mamba import LEAST_TIME_STEP
from megaconv.megatron.arguments.read import from_arguments, read_layout
from megaconv.megatron.arguments.router import BIAS_ON_LOGITS, RENORMALIZED
from megaconv.megatron.arguments.sparse import INDEXER_ORDER
from megaconv.megatron.arguments.whole import HF_NAMES
from megaconv.megatron.arguments.write import LEFT_OUT
from megaconv.megatron.optimizer.buffers import bucket_sizes
from megaconv.megatron.rank_files import configuration
from megaconv.megatron.states.hybrid_form import MODEL_CLASS
from megaconv.megatron.states.origin import OF_ONE_RUN
from megaconv.megatron.states.releases import NAMED_BY
from megaconv.model.config import ModelConfig
from megaconv.options import LoadOptions
from megatron_lite.settings.config import Settings, subjects
from tests.config_models import LLAMA, configs, found_in_tensors, raw_config, read
from tests.conftest import FIXTURES
from tests.megatron.test_megatron_args import arguments
from tests.megatron_fields import FILE, Fields, order, read_installed
from tests.runs import assert_refused, run

FACTS = json.loads(FILE.read_text())
KNOWN = READ.union(REFUSED, *HARMLESS.values())
LLAMA_FIXTURE, MIXTURE_FIXTURE = "core-llama-tp1pp1", "core-mixtral-seq-tp1ep1"


# The lists, and the real classes.


def test_every_argument_is_in_one_list() -> None:
    lists = [READ, frozenset(REFUSED), *HARMLESS.values()]
    assert sum(map(len, lists)) == len(KNOWN)
    assert LIMITED.keys() <= READ


@pytest.mark.parametrize("source", ["wheels", "repository"])
def test_every_field_of_every_release_is_known(source: str) -> None:
    unknown = {
        name: defaults
        for name, defaults in FACTS[source]["fields"].items()
        if bare(name) not in KNOWN
    }
    assert not unknown, f"to be sorted into known.py or harmless.py: {unknown}"


def test_every_argument_of_every_parser_is_known() -> None:
    unknown = {
        name: tags for name, tags in FACTS["repository"]["arguments"].items() if name not in KNOWN
    }
    assert not unknown, f"to be sorted into known.py or harmless.py: {unknown}"


OF_TASKS = """
    faiss_match faiss_topk_retrievals orig_global_batch_size orig_micro_batch_size overlapping_eval qa_data_dev qa_data_test
    strict_lambada train_iters_per_epoch
"""
"""Arguments of tasks/main.py and tasks/finetune_utils.py, which those lists don't contain."""


def test_nothing_is_listed_that_no_release_has() -> None:
    fields = {bare(name) for source in ("wheels", "repository") for name in FACTS[source]["fields"]}
    of_a_release_without_a_tag = {"num_unique_layers", "param_sharing_style"}
    asked_of_the_configuration_by_gpt_model = {
        "yarn_rotary_scaling_factor",
        "yarn_mscale",
        "yarn_mscale_all_dim",
    }
    of_megatron_bridges_providers = {
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "query_pre_attn_scalar",
    }
    of_ms_swift = {"num_labels", "problem_type", "task_type"}
    others = (
        of_a_release_without_a_tag
        | of_ms_swift
        | asked_of_the_configuration_by_gpt_model
        | of_megatron_bridges_providers
    )
    others |= {
        LEFT_OUT,
        LATENT_NORM_EPSILON,
        LEAST_TIME_STEP,
        QK_NORM_WIDTH,
        UNPREDICTED,
        RENORMALIZED,
        BIAS_ON_LOGITS,
        INDEXER_ORDER,
        HF_NAMES,
        NAMED_BY,
        MODEL_CLASS,
        *OF_TASKS.split(),
    }
    assert (
        KNOWN - fields - FACTS["repository"]["arguments"].keys() - flags_of_our_trainer() == others
    )


def test_every_flag_of_our_trainer_is_known() -> None:
    """They stand in the args of the checkpoints that it writes."""
    assert flags_of_our_trainer() <= KNOWN


def flags_of_our_trainer() -> set[str]:
    hints = get_type_hints(Settings)
    return {field.name for subject in subjects() for field in dataclasses.fields(hints[subject])}


def bare(field: str) -> str:
    return field.partition(".")[2]


def installed() -> Fields:
    found = importlib.util.find_spec("megatron.core")
    assert found is not None
    assert found.origin is not None
    return read_installed(Path(found.origin).parent)


@pytest.mark.oracle
def test_the_installed_release_has_the_fields_and_defaults_that_are_known_of_it() -> None:
    """A new release of Megatron core fails here: `python tests/megatron_fields.py wheels` reads it."""
    release = importlib.metadata.version("megatron-core")
    assert release in FACTS["wheels"]["releases"]
    known = {
        (name, default)
        for name, defaults in FACTS["wheels"]["fields"].items()
        for default, (first, last) in defaults.items()
        if order(first) <= order(release) <= order(last)
    }
    assert set(installed().items()) == known


@pytest.mark.oracle
@pytest.mark.slow
def test_fields_read_from_source_text_equal_the_real_fields() -> None:
    from megatron.core.transformer.heterogeneous.heterogeneous_config import (
        HeterogeneousTransformerConfig,
    )
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    read = installed()
    for real in (TransformerConfig, MLATransformerConfig, HeterogeneousTransformerConfig):
        names = {field.name for field in dataclasses.fields(real)}
        assert names <= KNOWN
        own = {bare(name) for name in read if name.startswith(real.__name__ + ".")}
        assert own <= names
        for field in dataclasses.fields(real):
            limit = {**LIMITED, **REFUSED}.get(field.name)
            if limit and field.name != "activation_func":  # this name means gelu
                assert field.default in limit.accepted, field.name


@pytest.mark.parametrize("source", ["wheels", "repository"])
def test_the_default_of_every_release_is_accepted(source: str) -> None:
    """The only exception is an activation: a function in the class, which is never in a checkpoint's args."""
    hybrid = "HybridConfig.is_hybrid_model"
    for name, defaults in FACTS[source]["fields"].items():
        limit = {**LIMITED, **REFUSED}.get(bare(name))
        if limit and name not in ("TransformerConfig.activation_func", hybrid):
            assert {ast.literal_eval(default) for default in defaults if default} <= set(
                limit.accepted
            ), name


# What megaconv asks for.


def test_the_list_of_read_arguments_equals_the_arguments_that_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: set[str] = set()

    def record(self: Namespace, name: str) -> Any:
        asked.add(name)
        return object.__getattribute__(self, name)

    monkeypatch.setattr(Namespace, "__getattribute__", record, raising=False)
    for path in real_checkpoints():
        if ONE_OF_EACH_KIND & set(path.parts):
            open_checkpoint(path)
    hybrid = FIXTURES / "hybrid-nemotron-h-tp2"  # it has few of Megatron's own arguments
    open_checkpoint(hybrid, LoadOptions(config=hybrid / "hf"))

    @given(configs())
    @settings(max_examples=300, deadline=None)
    def models(config: ModelConfig) -> None:
        args = Namespace(**arguments(config))
        read_layout(args, from_arguments(args, found_in_tensors(config)))

    models()
    indexed = read(raw_config("deepseek_v32"))  # random draws may leave this family out
    from_arguments(Namespace(**arguments(indexed)), found_in_tensors(indexed))
    old = arguments(LLAMA) | {"kv_channels": None, "use_rotary_position_embeddings": True}
    del old["position_embedding_type"]
    from_arguments(Namespace(**old), found_in_tensors(LLAMA))
    list(bucket_sizes(Namespace(overlap_grad_reduce=True), 0, 0, 1))
    names = {name for name in asked if not name.startswith("__")}
    assert names - READ - REFUSED.keys() == set(OF_ONE_RUN)
    # Of buckets of grouped experts, of vocabularies that are there, of models that see or hear, which no fixture has, and of
    # the saver.
    assert READ - names == {
        "moe_use_legacy_grouped_gemm",
        "merge_file",
        HF_NAMES,
        NAMED_BY,
        MODEL_CLASS,
    }


ONE_OF_EACH_KIND = {
    "core-mixtral-seq-tp2ep2",
    "core-llama-distopt-tp1pp2dp2",
    "dist-llama-optim-dp2buckets-dp_reshardable",
    "dist-mixtral-optim-ep2-dp_reshardable",
    "legacy-bert-tp2pp2",
    "old-gpt2-tp2-ckptv0",
    "pipelined-t5-tp2e1d1",
    "retro-tp2-torch",
}


def real_checkpoints() -> list[Path]:
    """All checkpoints of Megatron among the fixtures."""
    names = [
        path.name
        for path in sorted(FIXTURES.iterdir())
        if path.is_dir()
        and not path.name.startswith(
            (
                "dcp-",
                "initialized-",
                "peft-",
                "gguf-",
                "deepspeed-",
                "early-",
                "filter-",
                "orbax-",
                "modelopt-",
                "model-signing-",
                "ggml-",
                "fsdp1-",
                "trtllm",
                "compressed-",
                "gptq-",
                "bitsandbytes",
                "mlx",
                "torchao-",
                "verl-",  # verl saves no arguments
            )
        )
    ]
    # One was written by a script that gave it few arguments.
    found = [
        FIXTURES / name / "checkpoint"
        for name in names
        if "CORRUPT" not in name and not name.startswith("hybrid-")
    ]
    return [path if path.is_dir() else path.parent for path in found]


@pytest.mark.parametrize("path", real_checkpoints(), ids=lambda path: path.parent.name)
def test_real_checkpoints_have_nothing_that_is_unknown(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "megaconv"):
        open_checkpoint(path)
    assert "no release of Megatron" not in caplog.text


# What is refused.


class Read(NamedTuple):
    """The configuration that megaconv reads from a checkpoint."""

    args: Namespace
    found: dict[str, Any]

    def config(self, **changed: object) -> ModelConfig:
        return from_arguments(Namespace(**vars(self.args) | changed), self.found)


@pytest.fixture(params=[LLAMA_FIXTURE, MIXTURE_FIXTURE])
def real(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Read:
    """The configuration of a real checkpoint."""
    captured: list[Read] = []

    def capture(args: Namespace, found: dict[str, Any], **more: Any) -> ModelConfig:
        captured.append(Read(args, found))
        return from_arguments(args, found, **more)

    monkeypatch.setattr(configuration, "from_arguments", capture)
    open_checkpoint(FIXTURES / request.param / "checkpoint")
    return captured[0]


OTHER: dict[str, tuple[object, ...]] = {
    "moe_router_load_balancing_type": ("sinkhorn", ["aux_loss", "sinkhorn"], "quantile_balancing"),
    "softmax_type": ("off-by-one",),
    "spec": (["megatron.core.models.retro.decoder_spec", "get_retro_decoder_block_spec"],),
    "mrope_section": ([16, 24, 24],),
}
"""Values that are not off; True for any other argument of two values, else a word."""


def others(name: str, limit: Limit) -> tuple[object, ...]:
    return OTHER.get(name) or ((True,) if False in limit.accepted else ("something", 7))


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_refused_argument_is_named_with_its_value_and_what_it_computes(
    name: str, real: Read
) -> None:
    limit = REFUSED[name]
    for value in others(name, limit):
        more = {"swiglu": False} if limit.only == "gelu" else {}
        if limit.only == "experts" and not real.found.get("experts.count"):
            assert real.config(**{name: value}) == real.config()
            continue
        with pytest.raises(UnknownFamily) as refused:
            real.config(**{name: value}, **more)
        for word in (name, repr(value), limit.computes, "expected"):
            assert word in str(refused.value)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_arguments_that_are_off_change_nothing(name: str, real: Read) -> None:
    expected = real.config()
    for value in REFUSED[name].accepted:
        if name != "softmax_type":  # the tensors show it
            assert real.config(**{name: value}) == expected
            assert real.config(**{name: [value, value]}) == expected


def test_an_object_is_accepted_nowhere(real: Read) -> None:
    with pytest.raises(UnknownFamily, match="mrope_section is <object"):
        real.config(mrope_section=object())


@pytest.mark.parametrize("reason", HARMLESS)
def test_a_harmless_argument_changes_nothing_whatever_its_value(reason: str, real: Read) -> None:
    expected, layout = real.config(), read_layout(real.args, real.config())
    for strange in (True, -7, "strange", [3], None):
        changed = dict.fromkeys(HARMLESS[reason], strange)
        assert real.config(**changed) == expected
        assert read_layout(Namespace(**vars(real.args) | changed), expected) == layout


@pytest.mark.parametrize(
    ("table", "rotary", "fits"),
    [(True, True, False), (False, False, False), (True, False, True), (False, True, True)],
)
def test_before_core_0_4_positions_are_a_table_or_rotary_not_both_or_none(
    table: bool, rotary: bool, fits: bool
) -> None:
    """The tag 23.04 chooses each for itself, and has no position_embedding_type."""
    args = Namespace(use_rotary_position_embeddings=rotary, add_position_embedding=table)
    found = {"positions.kind": "learned"} if table else {}
    if fits:
        check_arguments(args, found, legacy=True)
    else:
        with pytest.raises(UnknownFamily, match="use_rotary_position_embeddings"):
            check_arguments(args, found, legacy=True)


def test_an_argument_of_a_fork_is_warned_of_once_unless_it_is_off(
    caplog: pytest.LogCaptureFixture,
) -> None:
    args = Namespace(**arguments(LLAMA), our_attention=3, our_flag=False, our_path="", our_list=[])
    with caplog.at_level(logging.WARNING, "megaconv"):
        from_arguments(args, found_in_tensors(LLAMA))
    (record,) = caplog.records
    assert "our_attention" in record.getMessage()
    assert "our_flag" not in record.getMessage()


@pytest.mark.parametrize(("factor", "is_told"), [(1.25, True), (-1, False), (None, False)])
def test_a_reader_is_told_of_experts_that_drop_tokens(
    factor: float | None, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "megaconv"):
        check_arguments(Namespace(moe_expert_capacity_factor=factor), {"experts.count": 4})
    said = [record.getMessage() for record in caplog.records]
    assert [f"moe_expert_capacity_factor is {factor}" in line for line in said] == [True] * is_told


# The same at the command line.


class Object:
    """Stands for objects of other packages in a real rank file; without them it can be written again."""

    def __init__(self, *_: object) -> None: ...


OBJECTS = (
    "megatron.core.transformer.enums.AttnBackend",
    "megatron.core.enums.ModelType",
    "signal.Signals",
)


@pytest.fixture
def edited(tmp_path: Path) -> Callable[[dict[str, Any]], Path]:
    """Copies a real checkpoint with other arguments."""
    (file,) = (FIXTURES / LLAMA_FIXTURE).rglob("model_optim_rng.pt")
    arrays = [np._core.multiarray._reconstruct, np.ndarray, np.dtype, type(np.dtype(np.uint32))]
    with torch.serialization.safe_globals(
        [Namespace, *arrays, *((Object, name) for name in OBJECTS)]
    ):
        state = torch.load(file, map_location="cpu", weights_only=True)

    def edit(changed: dict[str, Any]) -> Path:
        args = {
            name: value
            for name, value in vars(state["args"]).items()
            if not isinstance(value, Object)
        }
        target = tmp_path / "checkpoint" / "release" / "mp_rank_00" / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state | {"args": Namespace(**args | changed)}, target)
        (tmp_path / "checkpoint" / "latest_checkpointed_iteration.txt").write_text("release")
        return tmp_path / "checkpoint"

    return edit


@pytest.mark.parametrize(
    "command", [["fingerprint"], ["convert", "--saver", "hf", "--save-dir", "OUT", "--load-dir"]]
)
def test_the_commands_refuse_with_status_3(
    command: list[str], edited: Callable[[dict[str, Any]], Path], tmp_path: Path
) -> None:
    for name, limit in REFUSED.items():
        if limit.only != "experts":
            value = others(name, limit)[0]
            more = {"swiglu": limit.only != "gelu"}
            path = edited(dict.fromkeys(REFUSED) | {name: value} | more)
            outcome = run(
                *[str(tmp_path / "out") if word == "OUT" else word for word in command], path
            )
            assert_refused(outcome, 3, name, repr(value))
            assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"num_attention_heads": "many"}, "'many'"),
        ({"norm_epsilon": "small"}, "'small'"),
        ({"window_size": 7, "window_attn_skip_freq": None}, "int"),
    ],
)
def test_an_impossible_value_is_refused_with_the_directory(
    changed: dict[str, Any], found: str, edited: Callable[[dict[str, Any]], Path]
) -> None:
    path = edited(changed)
    outcome = run("inspect", path)
    assert_refused(outcome, 3, f"{path / 'release'}: the ", found)


def test_a_config_json_beside_it_hides_nothing(
    edited: Callable[[dict[str, Any]], Path], tmp_path: Path
) -> None:
    """It has no word for what the arguments ask for."""
    run(
        "convert",
        "--load-dir",
        FIXTURES / LLAMA_FIXTURE / "checkpoint",
        "--saver",
        "hf",
        "--save-dir",
        tmp_path / "hf",
    )
    path = edited({"export_qk_l2_norm": True})
    (tmp_path / "hf").rename(path / "hf")
    assert_refused(run("fingerprint", path), 3, "export_qk_l2_norm")


def test_the_commands_say_nothing_of_what_is_harmless(
    edited: Callable[[dict[str, Any]], Path],
) -> None:
    def said(changes: dict[str, Any]) -> tuple[int, str, list[str]]:
        outcome = run("inspect", edited(changes))
        return (
            outcome.status,
            outcome.err,
            [line for line in outcome.out.splitlines() if not line.startswith("on disk")],
        )

    names = frozenset[str]().union(*HARMLESS.values())
    assert said(dict.fromkeys(names, "strange")) == said({})

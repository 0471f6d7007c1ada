"""The command line: help, spellings of Megatron-LM, JSON, dry runs, comparisons, exit statuses, and what it doesn't import."""

import json
import math
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from megaconv.json_text import json_text
from tests.conftest import FIXTURES
from tests.models import write_llama
from tests.runs import assert_refused, finish, on_a_terminal, run, snapshot, start, unchanged

COMMANDS = (
    "convert",
    "merge",
    "average",
    "delta",
    "apply",
    "push",
    "inspect",
    "plan",
    "fingerprint",
    "verify",
    "seal",
    "diff",
    "scan",
    "clean",
    "serve-hf",
    "formats",
    "new-family",
    "demo",
)
TP2PP2 = FIXTURES / "core-llama-tp2pp2" / "checkpoint"


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama."""
    return write_llama(tmp_path_factory.mktemp("models") / "hf")


@pytest.fixture(scope="module")
def core(hf: Path) -> Path:
    """The same, sharded."""
    return convert(hf, hf.parent / "core", "--saver", "core", "--tp", "2", "--pp", "2")


def convert(source: Path, target: Path, *options: object) -> Path:
    outcome = run("convert", "--load-dir", source, "--save-dir", target, *options)
    assert outcome.status == 0, outcome
    return target


def strict_json(text: str) -> Any:
    """Refuses NaN and Infinity, which Python writes and nobody else reads."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_json_has_null_for_numbers_that_it_lacks() -> None:
    value = {"a": [math.nan, (1.5, -math.inf)], "b": {"c": math.inf}, "d": "NaN", "e": None}
    assert strict_json(json_text(value)) == {
        "a": [None, [1.5, None]],
        "b": {"c": None},
        "d": "NaN",
        "e": None,
    }


# Help.


@pytest.mark.parametrize("flag", ["--help", "-h"])
@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_every_command_explains_itself(command: str, flag: str) -> None:
    outcome = run(*command.split(), flag)
    assert (outcome.status, outcome.err) == (0, "")
    assert re.match(rf"Usage: \S*( \S+)*megaconv {command}", outcome.out)
    assert "\x1b" not in outcome.out


def test_the_general_help_lists_every_command() -> None:
    listed = run("--help").out
    assert all(re.search(rf"^ +{command} +\S", listed, re.MULTILINE) for command in COMMANDS)


@pytest.mark.parametrize("command", ["convert", "inspect", "fingerprint", "diff"])
def test_help_ends_with_an_example(command: str) -> None:
    shown = run(command, "--help").out
    assert re.search(rf"Example.*megaconv {command} ", shown, re.DOTALL)


def test_the_examples_of_convert_run(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = re.findall(r"^ +(megaconv convert .*)$", run("convert", "--help").out, re.MULTILINE)
    assert len(examples) == 4
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Llama-2-7b").symlink_to(hf)
    (tmp_path / "my-tokenizer").mkdir()
    (tmp_path / "my-tokenizer" / "vocab.json").write_text('{"a": 0, "b": 1}')
    for example in examples:
        outcome = run(*example.partition("#")[0].split()[1:])
        assert outcome.status == 0, (example, outcome)
    assert run("diff", "Llama-2-7b", "Llama-back").status == 0


def test_help_lists_commands_in_the_order_of_their_modules() -> None:
    listed = run("--help").out.partition("Commands:")[2]
    found = [line.split()[0] for line in listed.splitlines() if re.match(r"  \S", line)]
    assert found == list(COMMANDS)
    assert "..." not in listed


def test_without_a_command_help_is_shown() -> None:
    assert re.search(r"Usage: .*megaconv", "".join(run()[1:]))


def test_version_prints_the_version() -> None:
    assert run("--version").out == f"megaconv {megaconv.__version__}\n"


def test_both_commands_tell_their_version() -> None:
    from subprocess import run as execute

    shown = execute([sys.executable, "-m", "megatron_lite", "--version"], capture_output=True, text=True, check=True,
                    cwd=Path(__file__).parents[2])  # fmt: skip
    assert shown.stdout == f"megatron-lite {megaconv.__version__}\n"


def test_options_are_listed_under_headings() -> None:
    shown = run("convert", "--help").out
    headings = re.findall(r"^([A-Z][a-z ]+):$", shown, re.MULTILINE)
    assert headings[:5] == ["Input and output", "Layout", "Form of the output", "Values", "The run"]
    layout = shown.partition("Layout:")[2].partition("Form of the output:")[0]
    assert "--vpp" in layout
    assert "--dtype" not in layout


def test_source_and_target_may_stand_without_their_options(hf: Path, tmp_path: Path) -> None:
    assert run("convert", hf, tmp_path / "out", "--saver", "core").status == 0
    assert run("convert", "--load-dir", hf, tmp_path / "other", "--saver", "core").status == 2
    assert_refused(
        run("convert", hf, "--saver", "core"),
        2,
        "the output is missing",
        "convert SRC DST --saver NAME",
    )
    twice = run("convert", hf, tmp_path / "b", "--load-dir", hf, "--saver", "core")
    assert_refused(twice, 2, "the input is given twice", "--load-dir")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_quiet_prints_nothing_but_warnings_and_errors(hf: Path, tmp_path: Path) -> None:
    assert run("convert", hf, tmp_path / "out", "--saver", "core", "--quiet") == (0, "", "")
    outcome = run("convert", TP2PP2, tmp_path / "back", "--saver", "hf", "-q")
    assert (outcome.status, outcome.out) == (0, "")
    assert "no tokenizer" in outcome.err


def test_progress_without_a_terminal_is_a_line_now_and_then(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megaconv.commands.progress.LINE_SECONDS", 0.0)
    outcome = run("convert", hf, tmp_path / "out", "--saver", "core", "--workers", 1)
    assert outcome.status == 0
    line = r"converting: [\d.]+ \w+ of [\d.]+ KiB \(\d+%\), [\d.]+ \w+/s, \d+ s left"
    assert all(re.fullmatch(line, each) for each in outcome.err.splitlines())
    assert "(100%)" in outcome.err


# Megatron-LM's command lines.


def test_a_command_line_for_megatrons_converter_runs_as_it_is(
    hf: Path, core: Path, tmp_path: Path
) -> None:
    options = (
        "--model-type GPT --loader llama_mistral --checkpoint-type hf --model-size llama2-7B --saver mcore "
        "--target-tensor-parallel-size 2 --target-pipeline-parallel-size 2 --tokenizer-model X --vocab-file V --megatron-path Y "
        "--bf16 --max-queue-size 50 --no-checking --loader-transformer-impl local --saver-transformer-impl transformer_engine "
        "--make-vocab-size-divisible-by 128 --position-embedding-type rope --target-expert-parallel-size 1"
    )
    out = convert(hf, tmp_path / "out", *options.split())
    assert rank_files(out) == rank_files(core)


def test_a_command_line_for_resharding_runs_as_it_is(core: Path, hf: Path, tmp_path: Path) -> None:
    options = "--model-type GPT --loader mcore --saver mcore --target-tensor-parallel-size 4 --target-pipeline-parallel-size 1"
    out = convert(core, tmp_path / "out", *options.split(), "--true-vocab-size", "131")
    assert sorted(path.name for path in (out / "release").iterdir()) == [
        "mp_rank_00",
        "mp_rank_01",
        "mp_rank_02",
        "mp_rank_03",
    ]
    assert run("diff", hf, out).status == 0


def rank_files(root: Path) -> dict[str, str]:
    return {name: digest for name, digest in snapshot(root).items() if name.endswith(".pt")}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--model-type BERT", "--model-type BERT: the model is a GPT (llama)"),
        ("--model-type gpt", "--model-type gpt: is not known; choose one of GPT, BERT, T5"),
        ("--checkpoint-type gguf", "--checkpoint-type gguf: is not known"),
        ("--bf16 --fp16", "contradict each other"),
        ("--dtype fp32 --bf16", "contradict each other"),
    ],
)
def test_megatrons_options_that_ask_for_something_else_are_refused(
    hf: Path, tmp_path: Path, options: str, words: str
) -> None:
    outcome = run(
        "convert",
        "--load-dir",
        hf,
        "--saver",
        "core",
        "--save-dir",
        tmp_path / "out",
        *options.split(),
    )
    assert_refused(outcome, 2, words)


@pytest.mark.parametrize(
    ("options", "layers"),
    [
        ("--pp 2 --decoder-first-pipeline-num-layers 1", "1+3"),
        ("--pp 2 --decoder-last-pipeline-num-layers 1", "3+1"),
        ("--pp 2 --layer-split 3,1", "3+1"),
        (
            "--pp 3 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
            "1+2+1",
        ),
        ("--pp 2 --vpp 2 --pipeline-model-parallel-layout Et|t|tt|L", "1+1+2+0"),
        ("--pp 2 --pipeline-model-parallel-layout Et|t|tt|L", "1+1+2+0"),
        ("--pp 2 --layer-split 1,1,2,0", "1+1+2+0"),
    ],
)
def test_uneven_layouts_in_all_of_megatrons_words(
    hf: Path, tmp_path: Path, options: str, layers: str
) -> None:
    """A list of stages also says how many virtual stages there are, as it does in Megatron."""
    out = convert(hf, tmp_path / "out", "--saver", "core", *options.split())
    assert f"(layers {layers})" in run("inspect", out).out


# JSON, dry runs, and where output goes.


def test_convert_answers_with_one_json_document(hf: Path, tmp_path: Path) -> None:
    outcome = run(
        "convert",
        "--load-dir",
        hf,
        "--saver",
        "core",
        "--save-dir",
        tmp_path / "out",
        "--tp",
        2,
        "--verify",
        "--json",
    )
    document = strict_json(outcome.out)
    assert outcome.err == ""
    assert (document["target"], document["family"], document["verified"]) == (
        str(tmp_path / "out"),
        "llama",
        True,
    )
    assert document["fingerprint"] == megaconv.fingerprint(hf).weights
    assert document["bytes"] == sum(document["files"].values())


@pytest.mark.parametrize(
    "arguments",
    [["inspect", "A"], ["fingerprint", "A"], ["diff", "A", "B"], ["formats"]],
    ids=lambda arguments: arguments[0],
)
def test_every_command_answers_with_one_json_document(
    hf: Path, core: Path, arguments: list[str]
) -> None:
    places = {"A": hf, "B": core}
    outcome = run(*(places.get(word, word) for word in arguments), "--json")
    assert (outcome.status, outcome.err) == (0, "")
    assert strict_json(outcome.out)


def test_warnings_do_not_disturb_the_document(core: Path, tmp_path: Path) -> None:
    """The command runs in a process of its own, where warnings go to the real stderr."""
    source = without_true_vocab(core, tmp_path)
    outcome = finish(
        start(
            "convert",
            "--load-dir",
            source,
            "--saver",
            "hf",
            "--save-dir",
            tmp_path / "out",
            "--json",
        )
    )
    assert strict_json(outcome.out)["family"] == "llama"
    assert outcome.err.startswith("megaconv: warning: the true vocabulary size is unknown")


def without_true_vocab(core: Path, tmp_path: Path) -> Path:
    from argparse import Namespace

    source = tmp_path / "source"
    convert(core, source, "--saver", "core")
    for path in (*(source / "hf").iterdir(), source / "megaconv.json"):
        path.unlink()
    for path in source.glob("*/*/model_optim_rng.pt"):
        with torch.serialization.safe_globals([Namespace]):
            state = torch.load(path, weights_only=True)
        del state["args"].vocab_size
        torch.save(state, path)
    return source


LAYOUTS = [
    ["--saver", "core", "--tp", "4", "--pp", "2"],
    ["--saver", "core", "--pp", "2", "--vpp", "2", "--transformer-impl", "local", "--release"],
    ["--saver", "hf"],
    ["--saver", "hf", "--max-shard-size", "20KB", "--dtype", "fp32"],
]


@pytest.mark.parametrize("options", LAYOUTS, ids=" ".join)
def test_a_dry_run_lists_exactly_the_files_that_the_run_then_writes(
    hf: Path, tmp_path: Path, options: list[str]
) -> None:
    target = tmp_path / "out"
    arguments = ["convert", "--load-dir", hf, "--save-dir", target, *options]
    with unchanged(tmp_path), unchanged(hf):
        listed, document = (
            run(*arguments, "--dry-run"),
            strict_json(run(*arguments, "--dry-run", "--json").out),
        )
    assert (listed.status, listed.err) == (0, "")
    *lines, total = listed.out.splitlines()
    promised = {path: int(size.replace(",", "")) for size, path in (line.split() for line in lines)}
    run(*arguments)
    written = {str(path): path.stat().st_size for path in target.rglob("*") if path.is_file()}
    assert promised == written
    assert document["files"] == {
        str(Path(path).relative_to(target)): size for path, size in written.items()
    }
    assert int(total.split()[0].replace(",", "")) == document["bytes"] == sum(written.values())
    assert document["fingerprint"] is None


def test_a_dry_run_refuses_the_place_that_the_run_would_refuse(hf: Path, tmp_path: Path) -> None:
    (taken := tmp_path / "taken").mkdir()
    (taken / "notes.txt").write_text("mine")
    for target, options, words in (
        (taken, (), "already exists; choose another place, or give --overwrite"),
        (taken, ("--overwrite",), "--overwrite replaces checkpoints, and this is not one"),
        (hf, ("--overwrite",), "is the source"),
    ):
        with unchanged(tmp_path), unchanged(hf):
            arguments = (
                "convert",
                "--load-dir",
                hf,
                "--saver",
                "hf",
                "--save-dir",
                target,
                *options,
            )
            rehearsed, refused = run(*arguments, "--dry-run"), run(*arguments)
        assert words in rehearsed.err
        assert (rehearsed.status, rehearsed.out, rehearsed.err) == (refused.status, "", refused.err)


def test_a_dry_run_tells_how_much_memory_buffers_will_take(hf: Path, tmp_path: Path) -> None:
    options = (
        "--saver",
        "hf",
        "--save-dir",
        tmp_path / "out",
        "--dry-run",
        "--json",
        "--max-memory",
        "1MiB",
        "--workers",
        "2",
    )
    assert (
        0 < strict_json(run("convert", "--load-dir", hf, *options).out)["memory_bytes"] <= 1 << 20
    )


def test_results_go_to_stdout_and_remarks_to_stderr(tmp_path: Path) -> None:
    source = FIXTURES / "core-llama-optim-tp2pp2" / "checkpoint"
    outcome = finish(
        start("convert", "--load-dir", source, "--saver", "hf", "--save-dir", tmp_path / "out")
    )
    assert outcome.status == 0
    incomplete, left_out = outcome.err.splitlines()
    assert incomplete.startswith("the output will have no tokenizer")
    assert left_out == "optimizer state was left out: only weights are converted"
    assert re.fullmatch(
        rf"{tmp_path}/out: [\d,]+ parameters, .* in \d+ files, .*\nfingerprint [0-9a-f]{{64}}\n",
        outcome.out,
    )


# Inspect, fingerprint, formats.


def test_inspect_tells_people_what_a_checkpoint_is() -> None:
    shown = dict(line.split(maxsplit=1) for line in run("inspect", TP2PP2).out.splitlines())
    assert shown["family"] == "llama"
    assert shown["layout"] == "TP 2, PP 2"
    assert shown["vocabulary"] == "100 (padded to 112)"
    assert shown["iteration"] == "5"


def test_inspect_tells_programs_all_that_it_knows(hf: Path) -> None:
    document = strict_json(run("inspect", hf, "--json").out)
    tensors = load_file(hf / "model.safetensors")
    assert (document["loader"], document["family"], document["layout"]) == ("hf", "llama", None)
    assert document["parameters"] == sum(tensor.numel() for tensor in tensors.values())
    assert document["dtypes"] == {"bfloat16": document["parameters"]}
    assert len(document["tensors"]) == len(tensors)
    assert document["tensors"]["layers.0.attn.k.weight"] == {"shape": [16, 32], "dtype": "bfloat16"}
    assert (document["config"]["positions.theta"], document["config"]["vocab"]) == (10000.0, 131)


def test_inspect_reads_no_weights(hf: Path, tmp_path: Path) -> None:
    """Only the header of this file is there; its tensors are a hole."""
    source = tmp_path / "sparse"
    source.mkdir()
    (source / "config.json").write_bytes((hf / "config.json").read_bytes())
    content = (hf / "model.safetensors").read_bytes()
    with (source / "model.safetensors").open("wb") as file:
        file.write(content[: 8 + int.from_bytes(content[:8], "little")])
        file.truncate(len(content))
    assert run("inspect", source).out == run("inspect", hf).out


def test_a_fingerprint_is_one_line_that_formats_do_not_change(hf: Path, core: Path) -> None:
    found = run("fingerprint", hf)
    assert re.fullmatch(r"[0-9a-f]{64}\n", found.out)
    assert run("fingerprint", core).out == found.out
    document = strict_json(run("fingerprint", core, "--json").out)
    assert (document["weights"], document["optimizer"]) == (found.out.strip(), None)
    assert len(document["tensors"]) == 39


def test_formats_lists_loaders_savers_and_families() -> None:
    document = strict_json(run("formats", "--json").out)
    neighbours = ["nemo", "dcp", "deepspeed", "fsdp", "orbax", "gguf", "trtllm", "mlx"]
    others = ["hf", "llama_mistral", "mixtral_hf", "peft", "config"]
    assert list(document["loaders"]) == ["delta", "core", "legacy", *neighbours, *others]
    assert list(document["savers"]) == [
        "core",
        "legacy",
        "dcp",
        "deepspeed",
        "hf",
        "llama_mistral",
        "gguf",
        "mlx",
        "trtllm",
        "peft",
    ]
    assert document["families"]["qwen3"] == ["Qwen3ForCausalLM"]
    shown = run("formats").out
    assert all(word in shown for word in ("loaders", "savers", "families", "MistralForCausalLM"))


def test_the_documentation_has_the_matrix_of_families_as_formats_prints_it() -> None:
    printed = run("formats").out
    page = (Path(__file__).parents[2] / "docs" / "families.md").read_text()
    assert f"```\n{printed[printed.index('families  ') :]}```\n" in page


def test_the_demo_proves_that_a_model_survives(tmp_path: Path) -> None:
    outcome = run("demo", "--dir", tmp_path / "demo")
    assert outcome.status == 0
    assert outcome.out.endswith("All equal: the same model, bit for bit.\n")
    assert sorted(path.name for path in (tmp_path / "demo").iterdir()) == [
        "core-tp2-pp2",
        "core-tp4",
        "llama",
        "llama-back",
    ]


# Diff.

Tensors = dict[str, torch.Tensor]


def changed(hf: Path, directory: Path, change: Callable[[Tensors], object], **config: Any) -> Path:
    """A copy of a model with other tensors or another configuration."""
    directory.mkdir()
    raw = json.loads((hf / "config.json").read_text()) | config
    (directory / "config.json").write_text(json.dumps(raw))
    tensors = load_file(hf / "model.safetensors")
    other = change(tensors)
    save_file(other if isinstance(other, dict) else tensors, directory / "model.safetensors")
    return directory


def differences(a: Path, b: Path) -> list[tuple[str, str, str, float | None]]:
    outcome = run("diff", a, b, "--json")
    document = strict_json(outcome.out)
    assert outcome.status == (0 if document["same"] else 4)
    return [
        tuple(entry[key] for key in ("tensor", "kind", "detail", "max_abs"))
        for entry in document["differences"]
    ]


def test_equal_models_are_the_same_whatever_their_format(hf: Path, core: Path) -> None:
    outcome = run("diff", hf, core)
    assert (outcome.status, outcome.out, outcome.err) == (0, "the same: 39 tensors are equal\n", "")


def test_other_values_are_counted_and_measured(hf: Path, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        weight = tensors["model.layers.2.mlp.up_proj.weight"]
        weight[0, 0], weight[5, 7], weight[5, 8] = 1.0, 2.0, 3.0

    first = changed(hf, tmp_path / "a", change)
    second = changed(
        first,
        tmp_path / "b",
        lambda tensors: tensors["model.layers.2.mlp.up_proj.weight"][5, 7:9].zero_(),
    )
    assert differences(first, second) == [
        ("layers.2.mlp.up.weight", "values", "2 of 1,792 elements", 3.0)
    ]
    shown = run("diff", first, second)
    assert (shown.status, shown.out.splitlines()[0]) == (4, "different: 1 of 39 tensors")
    assert re.search(
        r"layers\.2\.mlp\.up\.weight +values +2 of 1,792 elements, largest difference 3$",
        shown.out,
        re.MULTILINE,
    )


def test_a_sign_of_zero_is_a_difference_of_zero(hf: Path, tmp_path: Path) -> None:
    first = changed(hf, tmp_path / "a", lambda tensors: tensors["model.norm.weight"].zero_())
    second = changed(first, tmp_path / "b", lambda tensors: tensors["model.norm.weight"][:1].neg_())
    assert differences(first, second) == [("final_norm.weight", "values", "1 of 32 elements", 0.0)]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_differences_that_have_no_size_are_valid_json_too(
    hf: Path, tmp_path: Path, value: float
) -> None:
    other = changed(
        hf, tmp_path / "b", lambda tensors: tensors["model.norm.weight"][:1].fill_(value)
    )
    assert differences(hf, other) == [("final_norm.weight", "values", "1 of 32 elements", None)]
    assert "largest difference inf" in run("diff", hf, other).out


def test_a_tensor_that_only_one_side_has_is_named(hf: Path, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        del tensors["lm_head.weight"]

    tied = changed(hf, tmp_path / "tied", change, tie_word_embeddings=True)
    assert differences(hf, tied) == [("head.weight", "only in A", "[131, 32] bfloat16", None)]
    assert differences(tied, hf) == [("head.weight", "only in B", "[131, 32] bfloat16", None)]


def test_another_shape_is_shown(hf: Path, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> Tensors:
        return {
            name: tensor[:130].clone() if tensor.shape[0] == 131 else tensor
            for name, tensor in tensors.items()
        }

    cut = changed(hf, tmp_path / "cut", change, vocab_size=130)
    assert differences(hf, cut) == [
        ("embed.weight", "shape", "[131, 32] / [130, 32]", None),
        ("head.weight", "shape", "[131, 32] / [130, 32]", None),
    ]


def test_another_dtype_is_shown(hf: Path, tmp_path: Path) -> None:
    other = changed(
        hf,
        tmp_path / "b",
        lambda tensors: tensors | {"model.norm.weight": tensors["model.norm.weight"].float()},
    )
    assert differences(hf, other) == [("final_norm.weight", "dtype", "bfloat16 / float32", None)]


def test_configurations_are_compared_but_count_only_on_demand(hf: Path, tmp_path: Path) -> None:
    other = changed(hf, tmp_path / "b", lambda tensors: None, rope_theta=5e5)
    plain, strict = run("diff", hf, other), run("diff", hf, other, "--config-too")
    assert (plain.status, strict.status) == (0, 4)
    assert (
        plain.out
        == strict.out
        == (
            "the same: 39 tensors are equal\n  configuration: positions.theta is 10000.0 in A, 500000.0 in B\n"
        )
    )
    document = strict_json(run("diff", hf, other, "--json").out)
    assert document["config"] == [{"field": "positions.theta", "a": 10000.0, "b": 500000.0}]
    assert run("diff", hf, hf, "--config-too").status == 0


# What is imported.

LIST_MODULES = """
import atexit, sys
atexit.register(lambda: sys.stderr.write("\\nMODULES " + " ".join({name.partition(".")[0] for name in sys.modules})))
"""


def imported_by(*arguments: object, status: int = 0) -> set[str]:
    """Names of all top-level modules that a command has imported."""
    outcome = finish(start(*arguments, before=LIST_MODULES), seconds=60)
    assert outcome.status == status, outcome
    return set(outcome.err.split("\nMODULES ")[1].split())


FOREIGN = {"megatron", "transformer_engine", "transformers", "apex"}


@pytest.mark.parametrize(
    "arguments", [["--help"], ["convert", "--help"], ["--version"]], ids=" ".join
)
def test_help_starts_without_anything_heavy(arguments: list[str]) -> None:
    assert not imported_by(*arguments) & {
        "torch",
        "numpy",
        "safetensors",
        "huggingface_hub",
        "blake3",
        "tokenizers",
        *FOREIGN,
    }


@pytest.mark.parametrize("arguments", [["--help"], ["convert", "--help"]], ids=" ".join)
def test_help_imports_no_descriptions_of_models_and_no_readers_of_files(
    arguments: list[str],
) -> None:
    """They took a third of the time of --help."""
    unused = {"megaconv.model.config", "formats.regular_files", "concurrent.futures"}
    program = f"import atexit, sys; atexit.register(lambda: print({unused} & set(sys.modules)))\n"
    program += f"sys.argv[1:] = {arguments}\nfrom megaconv.commands.start import main\nmain()"
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=Path(__file__).parents[2], check=True
    )  # fmt: skip
    assert found.stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize("command", ["inspect", "plan"])
def test_names_and_shapes_are_looked_at_without_numpy(hf: Path, command: str) -> None:
    for path in (hf, FIXTURES / "dist-llama-tp2pp2", FIXTURES / "zarr-llama-tp2pp2" / "checkpoint"):
        assert "numpy" not in imported_by(command, path)


@pytest.mark.parametrize(
    "command",
    [
        "inspect A",
        "inspect B",
        "fingerprint A",
        "fingerprint B",
        "diff A B",
        "formats",
        "A to core",
        "B to core",
        "B to hf",
    ],
)
def test_torch_is_not_needed(hf: Path, core: Path, tmp_path: Path, command: str) -> None:
    places = {"A": str(hf), "B": str(core)}
    arguments = [places.get(word, word) for word in command.split()]
    if "to" in arguments:
        source, _, saver = arguments
        arguments = [
            "convert",
            "--load-dir",
            source,
            "--saver",
            saver,
            "--save-dir",
            str(tmp_path / "out"),
            "--verify",
        ]
        arguments += ["--tp", "4"] if saver == "core" else []
    assert not imported_by(*arguments) & {"torch", "huggingface_hub", *FOREIGN}


def test_a_cast_needs_no_torch_either(hf: Path, tmp_path: Path) -> None:
    found = imported_by(
        "convert",
        "--load-dir",
        hf,
        "--saver",
        "core",
        "--save-dir",
        tmp_path / "out",
        "--dtype",
        "fp32",
    )
    assert not found & {"torch", *FOREIGN}


def test_files_of_megatron_are_read_without_megatron() -> None:
    assert not imported_by("fingerprint", TP2PP2) & {"torch", *FOREIGN}


# Colours.


def test_output_that_is_no_terminal_has_no_escape_codes(hf: Path, tmp_path: Path) -> None:
    for arguments in (
        ["inspect", hf],
        ["convert", "--load-dir", hf, "--saver", "core", "--save-dir", tmp_path / "out"],
        ["convert"],
    ):
        outcome = finish(start(*arguments))
        assert "\x1b" not in outcome.out + outcome.err


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_no_color_is_respected_on_a_terminal(hf: Path) -> None:
    shown = on_a_terminal("fingerprint", hf, NO_COLOR="1")
    assert re.search(r"[0-9a-f]{64}", shown)
    assert not re.search(r"\x1b\[[0-9;]*m", shown)


# Exit statuses.


def test_a_usage_error_ends_with_status_2(hf: Path, tmp_path: Path) -> None:
    assert run("convert", "--load-dir", hf).status == 2
    assert run("nonsense").status == 2
    assert run("inspect", hf, "--no-such-option").status == 2
    assert_refused(
        run("convert", "--load-dir", hf, "--saver", "zip", "--save-dir", tmp_path / "out"),
        2,
        "no saver is called 'zip'",
        "core, legacy, dcp, deepspeed, hf",
    )
    assert_refused(run("inspect", tmp_path / "nothing"), 2, "no such file or directory")
    assert_refused(run("inspect", tmp_path), 3, "is an empty directory")


def test_an_unknown_loss_cannot_be_allowed(hf: Path, tmp_path: Path) -> None:
    options = ("--saver", "core", "--save-dir", tmp_path / "out", "--allow-lossy", "rope-scaling")
    assert_refused(run("convert", "--load-dir", hf, *options), 2, "rope-scaling", "rope_scaling")


def test_a_corrupt_input_ends_with_status_3(hf: Path, tmp_path: Path) -> None:
    source = changed(hf, tmp_path / "model", lambda tensors: None)
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert_refused(run("fingerprint", source), 3, "model.safetensors")


def test_an_unknown_family_ends_with_status_3(hf: Path, tmp_path: Path) -> None:
    source = changed(
        hf, tmp_path / "model", lambda tensors: None, architectures=["BlamaForCausalLM"]
    )
    outcome = run("convert", source, tmp_path / "out", "--saver", "core")
    assert_refused(outcome, 3, "BlamaForCausalLM", "LlamaForCausalLM")


def test_content_that_asks_to_be_run_ends_with_status_6(hf: Path, tmp_path: Path) -> None:
    class Program:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return os.system, (f"touch {tmp_path}/executed",)

    source = tmp_path / "model"
    source.mkdir()
    (source / "config.json").write_bytes((hf / "config.json").read_bytes())
    torch.save({"weight": Program()}, source / "pytorch_model.bin", pickle_module=pickle)
    assert_refused(run("inspect", source), 6, "pytorch_model.bin")
    assert not (tmp_path / "executed").exists()


def test_the_package_runs_as_a_module(hf: Path) -> None:
    """`python -m megaconv`, which is what torchrun and srun start."""
    import subprocess

    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    found = subprocess.run(
        [sys.executable, "-m", "megaconv", "fingerprint", str(hf)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert (found.returncode, found.stdout) == (0, run("fingerprint", hf).out)


@pytest.mark.parametrize(
    "command",
    [
        "fingerprint {}",
        "verify {}",
        "diff {} {}",
        "inspect {} --stats",
        "convert {} {}-out --saver hf",
    ],
)
def test_quiet_shows_no_progress(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megaconv.commands.progress.LINE_SECONDS", 0.0)
    model = tmp_path / "model"
    megaconv.convert(write_llama(tmp_path / "source", layers=1), model, saver="hf")
    words = command.replace("{}", str(model)).split()
    quiet = run(*words, "--quiet")
    assert (quiet.status, quiet.err) == (0, "")
    assert " left" in run(*words, *(["--overwrite"] if words[0] == "convert" else [])).err


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in ("formats", "demo")])
def test_a_command_without_arguments_says_what_is_missing(command: str) -> None:
    outcome = run(command)
    assert (outcome.status, outcome.out) == (2, "")
    assert "issing" in outcome.err

"""Requests that can't be met: one clear line, exit status 2, before any tensor is read or anything is written."""

import re
from pathlib import Path
from typing import NoReturn

import pytest

from formats.tensor import FileTensor, StridedTensor
from megaconv.commands.cli import COMMANDS
from megaconv.commands.wrong_usage import OTHER_WORDS
from tests.models import write_config, write_llama
from tests.runs import Outcome, assert_refused, run, snapshot, unchanged, write_old_output


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "model", layers=4, heads=8, kv_heads=4, ffn=56)


@pytest.fixture
def _no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_into(*_: object) -> NoReturn:
        raise AssertionError("a tensor was read")

    for kind in (FileTensor, StridedTensor):
        monkeypatch.setattr(kind, "read_into", read_into)


def convert(model: Path, *options: object, saver: str = "core") -> Outcome:
    return run(
        "convert",
        "--load-dir",
        model,
        "--saver",
        saver,
        "--save-dir",
        model.parent / "out",
        *options,
    )


# Layouts that the model can't be sharded to. The message says what, how large, over how many.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--tp 3", ["heads = 8", "(tp) = 3"]),
        ("--tp 16", ["heads = 8", "(tp) = 16"]),
        ("--pp 3", ["layers = 4", "pp", "3"]),
        ("--pp 8", ["layers = 4", "pp", "8"]),
        ("--pp 2 --vpp 4", ["layers = 4", "pp x vpp = 8"]),
        ("--vpp 2", ["virtual pipeline", "pipeline parallel size of 2 or more"]),
        ("--pp 2 --layer-split 1,2", ["1,2", "3 layers", "4"]),
        ("--pp 2 --layer-split 1,2,1", ["3 stages", "pp x vpp = 2 x 1 = 2"]),
        ("--pp 2 --vpp 2 --layer-split 2,2", ["2 stages", "pp x vpp = 2 x 2 = 4", "give --pp 1"]),
        ("--layer-split 1,3", ["2 stages", "pp x vpp = 1 x 1 = 1", "give --pp 2"]),
        ("--pp 3 --decoder-first-pipeline-num-layers 1", ["3", "2"]),
        (
            "--pp 2 --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 1",
            ["1 and 1", "4"],
        ),
        ("--pp 2 --decoder-first-pipeline-num-layers 5", ["5", "4"]),
        (
            "--pp 1 --decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 2",
            ["2 and 2"],
        ),
        ("--pp 2 --account-for-embedding-in-pipeline-split", ["4 +", "5", "2"]),
        ("--pp 2 --pipeline-model-parallel-layout Ettt|L", ["3 layers", "4"]),
        ("--pp 2 --pipeline-model-parallel-layout Etttt", ["Etttt", "expected E"]),
        ("--pp 2 --layer-split 2,2 --decoder-first-pipeline-num-layers 2", ["one layer split"]),
        ("--ep 2", ["(ep) = 2:", "no experts"]),
        ("--etp 2", ["(etp) = 2:", "no experts"]),
    ],
)
@pytest.mark.usefixtures("_no_reading")
def test_a_layout_that_does_not_fit_is_refused_before_anything_is_read(
    model: Path, options: str, words: list[str]
) -> None:
    with unchanged(model.parent):
        assert_refused(convert(model, *options.split()), 2, *words)


def test_a_size_that_is_too_small_is_refused_with_the_least(model: Path) -> None:
    assert_refused(
        convert(model, "--max-memory", "1KiB"), 2, "--max-memory '1KiB'", "4096 bytes", "unit"
    )


def test_layers_that_can_not_be_shared_out_evenly_are_refused_with_a_split_that_works(
    tmp_path: Path,
) -> None:
    model = write_llama(tmp_path / "model", layers=5)
    split = "--layer-split 2,2,1"
    assert_refused(
        convert(model, "--pp", 3), 2, "layers = 5", "--decoder-last-pipeline-num-layers 1", split
    )
    assert convert(model, "--pp", 3, *split.split(), "--dry-run").status == 0
    refused = convert(model, "--pp", 3, saver="legacy")
    assert_refused(refused, 2, "layers = 5")
    assert "--layer-split" not in refused.err  # legacy models can't have it


@pytest.mark.usefixtures("_no_reading")
def test_an_ffn_that_can_not_be_cut_is_named(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model", ffn=57)
    with unchanged(tmp_path):
        assert_refused(convert(model, "--tp", 2), 2, "ffn = 57", "(tp) = 2")


@pytest.mark.usefixtures("_no_reading")
def test_a_dry_run_refuses_what_the_run_would_refuse(model: Path) -> None:
    assert_refused(convert(model, "--tp", 3, "--dry-run"), 2, "heads = 8", "(tp) = 3")


# Keys that nobody knows.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            "--loader tensorflow",
            [
                "no loader",
                "'tensorflow'",
                "core, legacy, nemo, dcp, deepspeed, fsdp, orbax, gguf, trtllm, mlx, hf",
            ],
        ),
        ("--dtype fp8", ["'fp8'", "bf16, fp16, fp32"]),
        ("--dtype int8", ["'int8'", "bf16, fp16, fp32"]),
        ("--dtype bf16 --fp16", ["bf16", "fp16", "contradict"]),
        ("--max-memory 0", ["'0'", "256MiB"]),
        ("--max-memory 10", ["'10'", "256MiB"]),
        ("--max-shard-size 5", ["'5'", "5GB"]),
        ("--dist-files 4", ["--dist-files 4", "has no effect"]),
        ("--max-shard-size 1GB", ["--max-shard-size 1GB: has no effect with --saver core"]),
        ("--max-shard-size 5000MiB", ["--max-shard-size 5000MiB: has no effect"]),
        ("--max-shard-size 4097", ["--max-shard-size 4097: has no effect"]),
        ("--base model", ["--base model", "has no effect"]),
        ("--max-memory plenty", ["'plenty'", "256MiB"]),
        ("--max-memory 5XB", ["'5XB'", "256MiB"]),
        ("--max-memory=-1", ["'-1'", "256MiB"]),
        ("--max-shard-size 0B", ["'0B'", "5GB"]),
        ("--layer-split 2;2", ["2;2", "3,5,5,3"]),
        ("--transformer-impl flax", ["'flax'", "transformer_engine, local"]),
        ("--ckpt-format hdf5", ["'hdf5'", "torch"]),
        ("--vocab-padding noise", ["'noise'", "repeat or zero"]),
        ("--model-type BERT", ["BERT", "GPT"]),
        ("--checkpoint-type gguf", ["gguf", "hf, meta, mistral"]),
        ("--checkpoint-type meta", ["params.json", "--checkpoint-type hf"]),
        ("--true-vocab-size 100", ["131", "no padding"]),
    ],
)
@pytest.mark.usefixtures("_no_reading")
def test_an_unknown_word_is_refused_with_the_known_ones(
    model: Path, options: str, words: list[str]
) -> None:
    with unchanged(model.parent):
        assert_refused(convert(model, *options.split()), 2, *words)


@pytest.mark.parametrize(
    "options",
    [
        "--saver hf --tp 2", "--saver hf --pp 2", "--saver hf --ep 2", "--saver hf --layer-split 2,2", "--saver hf --release",
        "--saver hf --ckpt-format torch_dist", "--saver hf --dist-files 3", "--saver hf --transformer-impl local",
        "--saver hf --vocab-padding zero", "--saver hf --vocab-padding repeat", "--saver hf --ckpt-format torch",
        "--saver core --max-shard-size 5GB", "--saver hf --transformer-impl transformer_engine",
        "--saver hf --make-vocab-size-divisible-by 64", "--saver dcp --tp 2",
        "--saver dcp --max-shard-size 1GB", "--saver llama_mistral --pp 2", "--saver legacy --moe-grouped-gemm",
        "--saver core --ckpt-format zarr --dist-files 2",
    ],
)  # fmt: skip
@pytest.mark.usefixtures("_no_reading")
def test_an_option_that_chooses_nothing_for_the_output_is_refused(
    model: Path, options: str
) -> None:
    saver, *words = options.split()[1:]
    with unchanged(model.parent):
        assert_refused(
            convert(model, *words, saver=saver), 2, f"has no effect with --saver {saver}"
        )


@pytest.mark.parametrize(
    "options",
    ["--saver hf --tp 1 --pp 1", "--saver core --ckpt-format torch", "--saver legacy --ep 1"],
)
def test_options_that_say_what_there_is_anyway_are_no_error(model: Path, options: str) -> None:
    saver, *words = options.split()[1:]
    assert convert(model, *words, "--dry-run", saver=saver).status == 0


@pytest.mark.parametrize(
    "option",
    ["--moe-grouped-gemm", "--use-distributed-optimizer", "--no-use-distributed-optimizer"],
)
def test_an_option_about_what_the_model_or_the_source_has_not_is_refused(
    model: Path, option: str
) -> None:
    with unchanged(model.parent):
        assert_refused(
            convert(model, option),
            2,
            option.replace("--no-use", "--use"),
            "has no effect",
            "leave it out",
        )


def test_an_unknown_saver_is_refused_with_the_known_ones(model: Path) -> None:
    with unchanged(model.parent):
        assert_refused(
            convert(model, saver="pickle"),
            2,
            "no saver",
            "'pickle'",
            "core, legacy, dcp, deepspeed, hf",
        )


@pytest.mark.parametrize(
    "options",
    [
        *(["--tp", "0"], ["--tp", "two"], ["--workers", "-1"], ["--no-such-option"], ["--vpp"]),
        ["--max-memory", "9" * 400],
        ["--max-shard-size", "9" * 400 + "GiB"],
        ["--layer-split", "9" * 5000],
    ],
    ids=lambda words: words[0] + words[-1][:4],
)
def test_options_that_are_no_options_end_with_status_2(model: Path, options: list[str]) -> None:
    with unchanged(model.parent):
        outcome = convert(model, *options)
    assert (outcome.status, outcome.out) == (2, "")
    assert options[0] in outcome.err


def test_a_plan_of_more_than_any_run_has_is_refused(model: Path) -> None:
    for option in ("--seq-length", "--global-batch-size", "--gpus"):
        outcome = run("plan", model, "--gpus", 8, option, "9" * 400)
        assert (outcome.status, outcome.out) == (2, "")
        assert option in outcome.err


def test_two_models_that_differ_end_with_status_4(model: Path, tmp_path: Path) -> None:
    other = write_llama(tmp_path / "other", seed=1)
    outcome = run("diff", model, other)
    assert (outcome.status, outcome.err) == (4, "")
    assert outcome.out.startswith("different: 39 of 39 tensors\n")


def test_a_directory_that_can_not_be_written_to_is_an_error_of_its_own(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with unchanged(tmp_path):
        target = tmp_path / "file" / "below"
        assert_refused(
            run("convert", "--load-dir", model, "--saver", "core", "--save-dir", target),
            1,
            str(target.parent),
        )


# Targets where something is already.


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("kind", ["nothing", "empty directory", "symlink to an empty directory"])
def test_an_empty_directory_is_as_good_as_none(
    model: Path, tmp_path: Path, kind: str, overwrite: bool
) -> None:
    if kind == "empty directory":
        (tmp_path / "out").mkdir()
    elif kind == "symlink to an empty directory":
        (tmp_path / "real").mkdir()
        (tmp_path / "out").symlink_to("real")
    before = sorted(tmp_path.iterdir())
    outcome = convert(model, *(["--overwrite"] if overwrite else []))
    assert outcome.status == 0, outcome.err
    assert sorted(tmp_path.iterdir()) == sorted({*before, tmp_path / "out"})
    assert (tmp_path / "out").is_symlink() == ("symlink" in kind)
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").is_file()


def test_a_dangling_symlink_gets_the_directory_that_it_promises(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "out").symlink_to("real")
    assert convert(model).status == 0
    assert (tmp_path / "real" / "latest_checkpointed_iteration.txt").is_file()


def occupy(target: Path, kind: str) -> None:
    if kind == "file":
        target.write_text("precious")
        return
    if kind == "symlink":
        target.symlink_to("real")
        target = target.parent / "real"
    target.mkdir()
    (target / "precious.txt").write_text("precious")


@pytest.mark.parametrize("kind", ["directory", "file", "symlink"])
def test_an_occupied_target_is_refused_and_untouched(
    model: Path, tmp_path: Path, kind: str
) -> None:
    occupy(tmp_path / "out", kind)
    with unchanged(tmp_path):
        assert_refused(convert(model), 2, str(tmp_path / "out"), "already exists", "--overwrite")


@pytest.mark.parametrize("kind", ["directory", "symlink"])
def test_an_old_output_is_replaced_on_demand(model: Path, tmp_path: Path, kind: str) -> None:
    if kind == "symlink":
        (tmp_path / "out").symlink_to("real")
    write_old_output(tmp_path / ("real" if kind == "symlink" else "out"))
    before = sorted(path.name for path in tmp_path.iterdir())
    assert convert(model, "--overwrite").status == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert not (tmp_path / "out" / "precious.txt").exists()
    assert run("diff", model, tmp_path / "out").status == 0


def test_a_failed_run_that_would_have_replaced_a_target_leaves_it(
    model: Path, tmp_path: Path
) -> None:
    write_old_output(tmp_path / "out")
    with unchanged(tmp_path):
        assert_refused(convert(model, "--overwrite", "--tp", 3), 2, "heads")


def test_a_target_that_holds_its_own_source_is_refused(tmp_path: Path) -> None:
    """Replaced in one step, it would take the source with it."""
    model = write_llama(tmp_path / "out" / "model")
    with unchanged(tmp_path):
        assert_refused(
            run(
                "convert",
                "--load-dir",
                model,
                "--saver",
                "core",
                "--save-dir",
                tmp_path / "out",
                "--overwrite",
            ),
            2,
            "source",
        )


def test_a_directory_above_the_target_is_made(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "a" / "b" / "out"
    assert run("convert", "--load-dir", model, "--saver", "core", "--save-dir", target).status == 0
    assert [path.name for path in target.parent.iterdir()] == ["out"]


def test_a_source_is_the_same_after_a_conversion_as_before(model: Path, tmp_path: Path) -> None:
    before = snapshot(model)
    assert convert(model, "--verify").status == 0
    assert snapshot(model) == before


def test_a_conversion_without_a_saver_is_refused_with_the_list_of_savers(model: Path) -> None:
    assert_refused(
        run("convert", model, model.parent / "out"), 2, "--saver is missing", "core", "hf", "gguf"
    )


def test_a_demo_is_not_made_over_another_one(tmp_path: Path) -> None:
    (tmp_path / "demo" / "llama").mkdir(parents=True)
    outcome = run("demo", "--dir", tmp_path / "demo")
    assert outcome.status == 2
    assert (
        outcome.err
        == f"megaconv: error: {tmp_path / 'demo' / 'llama'}: already exists; choose another place, or remove it\n"
    )


def test_a_wrong_value_in_a_config_is_reported_with_its_path(model: Path) -> None:
    write_config(model, {"architectures": ["LlamaForCausalLM"], "hidden_size": None})
    assert_refused(
        convert(model), 3, f"{model / 'config.json'}: hidden_size should be a positive number"
    )


def test_quantize_for_gguf_names_the_option_that_does_it(model: Path) -> None:
    outcome = convert(model, "--quantize", "q4_0", saver="gguf")
    assert_refused(outcome, 2, "has no effect with --saver gguf", "--option gguf_type=q4_0")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("convert", "a", "b", "--tp", "two"), "'two' is not a whole number"),
        (("diff", "a", "b", "--tolerance", "some"), "'some' is not a number"),
    ],
)
def test_a_word_in_place_of_a_number_is_refused_in_plain_words(
    arguments: tuple[str, ...], words: str
) -> None:
    outcome = run(*arguments)
    assert (outcome.status, outcome.out) == (2, "")
    assert words in outcome.err


# Words that typer refuses.


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        ("convert a b --tensor-parallel 2", "no option --tensor-parallel",
         "did you mean --tp? `megaconv convert --help` lists the options"),
        ("convert a b --pipeline-parallel-size 2", "no option --pipeline-parallel-size",
         "did you mean --pp? `megaconv convert --help` lists the options"),
        ("plan a --tensor-model-parallel-size 2", "no option --tensor-model-parallel-size",
         "did you mean --tp? `megaconv plan --help` lists the options"),
        ("inspect a --zebra", "no option --zebra", "`megaconv inspect --help` lists the options"),
        ("average a b --option x=y", "no option --option",
         "`megaconv convert --average` has it; `megaconv average --help` lists the options"),
        ("merge a b --tp 2", "no option --tp", "`megaconv convert --adapter` has it; `megaconv merge --help` lists the options"),
        ("average a b --dtyp fp32", "no option --dtyp", "did you mean --dtype? `megaconv average --help` lists the options"),
        ("serve-hf", "missing argument 'PATH...'", "`megaconv serve-hf --help` describes the command"),
        ("convrt a b", "no such command 'convrt'", "did you mean 'convert'?"),
        ("zebra", "no such command 'zebra'", "`megaconv --help` describes the command"),
        ("quantize model out", "no such command 'quantize'", "`megaconv convert --quantize` does that"),
        ("serve model", "no such command 'serve'", "`megatron-lite serve` is a command of the trainer"),
        ("finetune model", "no such command 'finetune'", "`megatron-lite finetune` is a command of the trainer"),
        ("plan a --tp two", "invalid value for '--tp': 'two' is not a whole number", "`megaconv plan --help` describes the command"),
    ],
)  # fmt: skip
def test_a_wrong_word_is_one_line_with_the_nearest_that_exists(
    words: str, message: str, hint: str
) -> None:
    assert run(*words.split()) == Outcome(2, "", f"megaconv: error: {message}; {hint}\n")


def test_words_of_other_tools_lead_to_commands_and_options_that_there_are() -> None:
    assert not OTHER_WORDS.keys() & set(COMMANDS)
    for command, *options in map(str.split, OTHER_WORDS.values()):
        assert command in COMMANDS
        assert set(options) <= set(re.findall(r"--[\w-]+", run(command, "--help").out))


def test_an_option_without_its_value_is_one_line() -> None:
    refused = run("convert", "--tp")
    assert refused == Outcome(2, "", "megaconv: error: option '--tp' requires an argument\n")


@pytest.mark.parametrize(
    ("words", "nearest"),
    [("convert a b --saver coer", "core"), ("inspect a --loader hff", "hf")],
)
def test_a_misspelt_loader_or_saver_gets_the_nearest_name(
    words: str, nearest: str, model: Path
) -> None:
    refused = run(*(str(model) if word == "a" else word for word in words.split()))
    assert_refused(refused, 2, f"did you mean {nearest}? Known: ")


def test_all_commands_of_the_trainer_alone_are_known_as_such() -> None:
    from megaconv.commands.cli import COMMANDS
    from megaconv.commands.wrong_usage import TRAINER_COMMANDS
    from megatron_lite.commands.catalog import OTHERS
    from megatron_lite.settings.training_commands import DESCRIPTIONS

    assert {*DESCRIPTIONS, *OTHERS} - {*COMMANDS} == TRAINER_COMMANDS

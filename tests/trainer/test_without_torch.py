"""The trainer where torch isn't installed: help, `models` and `plan` work, everything else says in one line what to install."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_lite.settings.arguments import parse
from megatron_lite.settings.early_checks import check_load
from tests.package.test_without_torch import WITHOUT
from tests.runs import Outcome
from tests.trainer.loop.launches import LLAMA

ROOT = Path(__file__).parents[2]
MAIN = "from megatron_lite.cli import main\nmain()\n"
COMMANDS = (
    "pretrain",
    "finetune",
    "plan",
    "preprocess",
    "data",
    "generate",
    "chat",
    "score",
    "serve",
    "evaluate",
    "models",
    "retro",
    "embed",
    "retrieve",
)
SIZES = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --vocab-size 100 --tp 2 --pp 2 "
    "--world-size 8 --sequence-parallel --use-distributed-optimizer"
)


def run(*words: object) -> Outcome:
    found = subprocess.run(
        [sys.executable, "-c", WITHOUT + MAIN, *map(str, words)], capture_output=True, text=True, timeout=60, cwd=ROOT, check=False
    )  # fmt: skip
    return Outcome(found.returncode, found.stdout, found.stderr)


def refusal(*words: object) -> str:
    """The one line of a command that ends with status 2."""
    outcome = run(*words)
    assert (outcome.status, outcome.out) == (2, ""), outcome
    (line,) = outcome.err.splitlines()
    return line


@pytest.mark.parametrize("command", COMMANDS)
def test_help_needs_no_torch(command: str) -> None:
    outcome = run(command, "--help")
    assert (outcome.status, outcome.err) == (0, ""), outcome
    assert "--" in outcome.out


def test_families_are_listed_without_torch() -> None:
    outcome = run("models")
    assert (outcome.status, outcome.err) == (0, "")
    assert "| arcee | ArceeForCausalLM | yes |" in outcome.out


MIXTRAL = (
    "--num-experts 4 --moe-ffn-hidden-size 32 --ep 2 --normalization RMSNorm --position-embedding-type rope --swiglu "
    "--disable-bias-linear --untie-embeddings-and-output-weights"
)


@pytest.mark.parametrize("words", [SIZES, f"{SIZES} {MIXTRAL}", f"{SIZES} --optimizer muon"])
def test_a_run_is_planned_without_torch_as_with_it(
    words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    from megatron_lite.planning.command import main

    outcome = run("plan", *words.split())
    assert (outcome.status, outcome.err) == (0, ""), outcome
    assert main(words.split()) == 0
    assert outcome.out == capfd.readouterr().out


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (f"pretrain {LLAMA} --train-iters 2", "megatron-lite pretrain"),
        ("finetune --load nowhere --train-iters 2", "megatron-lite finetune"),
        ("generate --load nowhere Once", "megatron-lite generate"),
        ("chat --load nowhere", "megatron-lite chat"),
        ("score --load nowhere --input rows.jsonl", "megatron-lite score"),
        ("evaluate --load nowhere --lm-eval arc_easy", "megatron-lite evaluate"),
    ],
)
def test_commands_that_need_torch_say_in_one_line_what_to_install(words: str, what: str) -> None:
    expected = f"{what} needs torch (No module named 'torch'); in a clone of megaconv: pip install '.[train,data]'"
    assert refusal(*words.split()) == f"megatron-lite: error: {expected}"


def test_a_server_needs_another_extra() -> None:
    assert refusal("serve", "--load", "nowhere").endswith(
        "in a clone of megaconv: pip install '.[train,data,serve]'"
    )


def test_a_mistake_in_flags_is_found_without_torch() -> None:
    assert "unknown flag --num-layer; did you mean --num-layers?" in refusal(
        "pretrain", "--num-layer", "4"
    )
    assert "MODEL is missing" in refusal("generate", "--seed", "3")
    assert refusal("finetun", "model", "data").endswith("did you mean finetune?")
    assert refusal("push", "model", "org/name").endswith(
        "`megaconv push` is a command of the converter"
    )


@pytest.mark.parametrize(
    "words",
    [
        "pretrain --load ./nowhere --train-iters 2",
        "finetune --load ./nowhere --finetune-data README.md --save out",
        "finetune ./nowhere README.md --save out",
        "chat --load ./nowhere",
        "score --load ./nowhere --input README.md",
        "serve --load ./nowhere",
    ],
)
def test_a_model_that_is_not_there_is_refused_without_torch(words: str) -> None:
    """To import torch takes seconds."""
    expected = (
        f"megatron-lite: error: nowhere: no such file or directory (looked for {ROOT / 'nowhere'})"
    )
    assert refusal(*words.split()) == expected


@pytest.mark.parametrize(
    "flags",
    [
        "--load ./nowhere --save nowhere",
        "--load ./nowhere --save out --resume",
        "--load ./nowhere --pretrained-checkpoint README.md",
        "--load ./nowhere --bert-load README.md --ict-head-size 8",
        "--load hf://organisation/model",
        "--load s3://bucket/run",
        "--load organisation/model",
    ],
)
def test_only_a_path_that_has_to_be_there_is_refused(flags: str) -> None:
    settings, _ = parse("pretrain", f"{LLAMA} --train-iters 2 {flags}".split())
    check_load(settings)


def test_text_becomes_data_without_torch(tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text('{"text": "1 2 3"}\n')
    outcome = run(
        "preprocess", "--input", tmp_path / "texts.jsonl", "--tokenizer-type", "NullTokenizer", "--vocab-size", 10,
        "--output-prefix", tmp_path / "data",
    )  # fmt: skip
    assert outcome.status == 0, outcome
    assert (tmp_path / "data_text_document.bin").is_file()


def test_no_message_names_a_package_of_an_index_that_is_not_ours() -> None:
    """`pip install megaconv` would fetch what somebody else has put there."""
    folders = ("megaconv", "megatron_lite", "loaders", "savers", "formats", "docs", "examples")
    files = [
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".md", ".sh")
    ]
    wrong = (
        "pip install megaconv",
        "pip install 'megaconv",
        'pip install "megaconv',
        "pip install megatron-lite",
    )
    texts = {path: path.read_text(encoding="utf-8") for path in [*files, ROOT / "README.md"]}
    assert [path for path, text in texts.items() if any(words in text for words in wrong)] == []


FLAGS = "megatron_lite.settings.config"
MODELS = "megaconv.model.config"
"""The descriptions of flags and of models: modules of many dataclasses, which take time to build."""


@pytest.mark.parametrize(
    ("arguments", "left_out"),
    [
        (["--help"], {"numpy", "concurrent.futures", FLAGS, MODELS}),
        (["pretrain", "--help"], {"numpy", "concurrent.futures", MODELS}),
        (["plan", "--help"], {"numpy"}),
        (["plan", *SIZES.split(), "--global-batch-size", "4"], {"numpy", "megaconv.options"}),
        (["recipes"], {"numpy", FLAGS, MODELS}),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)  # fmt: skip
def test_a_short_command_imports_only_modules_that_it_needs(
    arguments: list[str], left_out: set[str]
) -> None:
    """numpy doubled the time until the help appeared; models and flags made it four times as long."""
    program = f"""
import atexit, sys
atexit.register(lambda: print({left_out} & set(sys.modules)))
from megatron_lite.cli import main
main({arguments})
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT, check=True)  # fmt: skip
    assert found.stdout.splitlines()[-1] == "set()"

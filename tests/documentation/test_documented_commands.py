"""Every command of README.md and docs/ runs on small checkpoints, or is listed here with the reason why it doesn't."""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megaconv
from tests.conftest import FIXTURES
from tests.documented_commands import (
    PAGES,
    Command,
    all_commands,
    run_documented,
    shell_environment,
)
from tests.families.test_families import write_model
from tests.models import write_llama
from tests.neighbours import write_automodel, write_bridge, write_nemo, write_swift
from tests.runs import run
from tests.trainer.multimodal import create, write_chats

NOT_RUN = {
    "installs from the network": (r"pip install ", r"^git clone ", r"-m venv ", r"^npm install "),
    "uploads to the Hub": (r"megaconv push .* --private$",),
    "reads a model from the Hub": (r"hf://", r"\borg/(name|base)\b", r"fingerprint my-org/"),
    "uses a bucket; tests/stores runs such commands": (r"^megaconv (delta|apply) s3://",),
    "reads packages from the network": (r"tests/megatron_fields\.py",),
    "serves without end; a how-to page starts and ends a server": (
        r"(megatron-lite|-m megatron_lite) serve ",
    ),
    "needs several machines": (r"--nnodes 4 ", r"^#!/bin/bash"),
    "needs a GPU or another program": (
        r"pretrain_gpt\.py",
        r"^(HF_ENDPOINT=\S+ )?vllm ",
        r"^python -m sglang",
        r"^llama-",
        r"^model_signing ",
    ),
    "builds a class of transformers; tests/drafting/ drafts families": (r"^megaconv new-family ",),
    "trains for days": (r"--train-iters 1000000",),
    "leaves flags out": (r" \.\.\.( |$)",),
    "is a variable of the command after it": (r"^export MEGATRON_LITE_API_KEY",),
    "measures or tests for many minutes": (
        r"^make ",
        r"python (-m )?benchmarks[./]",
        r"-m tests\.trust",
        r"-m pytest",
    ),
    "needs the entry point of an installation; tests/trainer/forward/ runs them": (
        r"verify .*--forward",
    ),
    "writes into the home directory": (r"~/",),
    "needs a checkpoint of Megatron-Bridge; tests/megatron/test_bridge_multimodal.py makes some": (
        r"^megaconv convert bridge-run ",
    ),
    "needs a Llama 3.1 or a Mixtral of MaxText; tests/loaders/test_orbax.py makes their arrays": (
        r"--load-dir checkpoints/7 ",
    ),
    "needs a corpus, scores or the extra data-recipes; tests/trainer/data/ and tests/trainer/inference/ run them": (
        r"megatron-lite data (clean|dedup|split|urls|tokenizer|score|select) ",
        r"megatron-lite evaluate (ckpt --corpus|--toxicity) ",
        r"--samples-per-prompt 25 ",
    ),
    "needs the server of the page; tests/serving/test_server.py loads a model from it": (
        r"^HF_ENDPOINT=\S+ python ",
    ),
    "needs a corpus, a project or passages; tests/trainer/retrieval/, test_retro.py and test_passages.py make some": (
        r"retro build --retro-project-dir",
        r"retro show P ",
        r" embed --load ict ",
        r"megatron-lite retrieve --index",
        r"--model-type biencoder",
        r"--task RET-FINETUNE-NQ",
        r"--retro-(project-dir project|neighbors|attention-gate)",
        r"megatron-lite data (questions|answers) ",
        r"generate tuned --prompts-file test\.jsonl",
    ),
    "needs a Retro with a final norm; tests/megatron/test_retro.py makes one": (
        r"--drop-retrieval",
    ),
    "needs statistics of the model; the commands of docs/calibrate.md measure some and convert with them": (
        r"convert --load-dir ckpt .* --calibration amax\.safetensors",
    ),
    "needs a model of this size; the commands of a how-to page measure a small one": (
        r"rank-channels .* --hidden-size 3072 ",
        r"--layers 0-19,28-31",
        r"--load pruned --teacher-load",
        r"VL-3B-Instruct prompts\.jsonl --grpo",
    ),
    "needs a model with MTP layers; tests/trainer/inference/test_drafting.py drafts": (
        r"--draft-tokens 1 ",
    ),
    "needs a run with --apply-layernorm-1p; tests/megatron/test_plain_norms.py makes one": (
        r"--option norms=plain ",
    ),
    "needs an archive of NeMo 1; tests/megatron/test_nemo_archives.py makes some": (r"\.nemo ",),
    "needs a corpus and its vocabulary; tests/trainer/loop/test_bert_runs.py and test_task_runs.py make some": (
        r"--split-sentences",
        r"^python - <<'END'",
        r"finetune --task MNLI",
        r"convert mnli ",
    ),
}
"""Reason -> regular expressions of commands that no test runs."""

ELSEWHERE = {
    r"^docs/how-to/": "tests/documentation/test_how_to.py",
    r"^docs/speedrun\.md": "tests/trainer/loop/test_speedrun.py",
}
"""Pages -> the test that runs their commands."""

AT_ONCE = ("docs/adapters.md", "docs/change.md", "docs/convert.md", "docs/inspect.md")
"""Pages whose commands run in every test run; the commands of all other pages are slow."""

CHAT = {
    "messages": [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "A model."}]
}
PAIR = {"prompt": "What?", "chosen": "A model.", "rejected": "A file."}
RATED = [
    {"prompt": prompt, "completion": answer, "label": label}
    for prompt in ("What?", "Which?")
    for answer, label in (("A model.", True), ("A file.", False))
]
TEMPLATE = (
    "{% for message in messages %}{{ message.role + ': ' }}{% if message.role == 'assistant' %}{% generation %}"
    "{{ message.content + eos_token }}{% endgeneration %}{% else %}{{ message.content }}{% endif %}{% endfor %}"
)

VOCABULARY = 408
"""Tokens of the small tokenizer."""
Make = Callable[[Path], object]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with a tokenizer and a chat template, which can be sharded over 8 ranks and over 8 stages."""
    place = tmp_path_factory.mktemp("llama")
    assert run("demo", "--dir", place).status == 0
    sizes: dict[str, Any] = {
        "layers": 8,
        "hidden": 256,
        "heads": 8,
        "kv_heads": 8,
        "ffn": 512,
        "vocab": VOCABULARY,
    }
    model = write_llama(place / "model", **sizes, extra_config={"max_position_embeddings": 512})
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(place / "llama" / name, model / name)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    return model


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return shell_environment(tmp_path_factory.mktemp("programs"))


def copy_of(source: Path) -> Make:
    return lambda target: shutil.copytree(source, target)


def fixture(name: str) -> Make:
    return copy_of(FIXTURES / name)


def multimodal(tokenizer_of: Path) -> Make:
    """A model with a vision encoder, with the tokenizer of another model and a vocabulary of its size."""

    def make(target: Path) -> None:
        shutil.copytree(FIXTURES / "whole-qwen2_5_vl", target)
        config = json.loads((target / "config.json").read_text())
        config["text_config"]["vocab_size"] = VOCABULARY
        (target / "config.json").write_text(json.dumps(config))
        tensors = load_file(target / "model.safetensors")
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            rows = tensors[name]
            tensors[name] = rows.repeat(VOCABULARY // len(rows) + 1, 1)[:VOCABULARY].contiguous()
        save_file(tensors, target / "model.safetensors", {"format": "pt"})
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(tokenizer_of / name, target / name)

    return make


def converted(source: Path, *options: str) -> Make:
    """A function that makes the output of `megaconv convert` for a checkpoint."""
    return lambda target: run("convert", source, target, *options)


def mixture(dense: Path, experts: int, *parts: str) -> Make:
    """A mixture of two layers, whose experts are the MLPs of a dense model, or parts of them."""
    return converted(
        dense, "--saver", "hf", "--layers", "0-1", "--num-experts", str(experts), *parts
    )


def saved(iteration: int) -> Make:
    """An iteration of a Megatron run, which has other weights than the others."""

    def make(target: Path) -> None:
        made = target.with_name("made")
        write_llama(made / "hf", seed=iteration)
        run("convert", made / "hf", made / "core", "--saver", "core", "--iteration", iteration)
        for path in (made / "core").glob("*iter*"):
            path.rename(target.parent / path.name)
        shutil.rmtree(made)

    return make


def lines(*rows: object) -> Make:
    """A file with a JSON document on each line."""
    return lambda target: target.write_text("".join(json.dumps(row) + "\n" for row in rows))


def bert(target: Path) -> None:
    """A MegatronBert of Hugging Face with one activation."""
    source = FIXTURES / "core-bert-tp2pp2" / "checkpoint"
    run("convert", source, target, "--saver", "hf", "--allow-lossy", "activation")


def core_bert(target: Path) -> None:
    """A BERT of Megatron core, whose layers and head have the exact gelu."""
    bert(target.parent / "made")
    config = target.parent / "made" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"hidden_act": "gelu"}))
    run("convert", target.parent / "made", target, "--saver", "core")


def gguf(source: Path) -> Make:
    def make(target: Path) -> None:
        run("convert", source, target.parent / "made", "--saver", "gguf")
        (target.parent / "made" / "model.gguf").rename(target)

    return make


def published(model: str) -> Make:
    """The config.json of a published model, without weights."""
    models = json.loads((FIXTURES / "published_models.json").read_text())
    (config,) = (each["config"] for each in models if each["model"] == model)

    def make(target: Path) -> None:
        target.mkdir()
        (target / "config.json").write_text(json.dumps(config))

    return make


def write_adapter(target: Path) -> None:
    """A LoRA adapter of all queries of the small Llama."""
    prefix = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    sides = {"A": (4, 256), "B": (256, 4)}
    tensors = {
        prefix.format(layer, side): torch.ones(shape)
        for layer in range(8)
        for side, shape in sides.items()
    }
    target.mkdir()
    save_file(tensors, target / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj"],
    }
    (target / "adapter_config.json").write_text(json.dumps(config))


def write_reward_adapter(target: Path) -> None:
    """The same of a reward model: with a head of scores."""
    write_adapter(target)
    file = target / "adapter_model.safetensors"
    save_file(load_file(file) | {"base_model.model.score.weight": torch.ones(1, 256)}, file)


def rewarding(llama: Path) -> Make:
    """A Llama with a head of scores in the place of that for words."""

    def make(target: Path) -> None:
        shutil.copytree(llama, target)
        raw = json.loads((target / "config.json").read_text())
        named = {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "reward"}}
        (target / "config.json").write_text(json.dumps(raw | named))
        weights = load_file(target / "model.safetensors")
        dtype = weights["model.norm.weight"].dtype
        weights.pop("lm_head.weight", None)
        weights["score.weight"] = torch.ones(1, 256, dtype=dtype)
        save_file(weights, target / "model.safetensors", {"format": "pt"})

    return make


def critic(llama: Path) -> Make:
    """The torch_dist checkpoint of a critic, without a config.json beside it."""

    def make(target: Path) -> None:
        hf, core = target.parent / "rewarding", target.parent / "core of it"
        rewarding(llama)(hf)
        run("convert", hf, core, "--saver", "core", "--ckpt-format", "torch_dist")
        (core / "release").rename(target)

    return make


def write_mlx_adapter(target: Path) -> None:
    """The same, as mlx-lm saves it."""
    name = "model.layers.{}.self_attn.q_proj.lora_{}"
    sides = {"a": (256, 4), "b": (4, 256)}
    tensors = {
        name.format(layer, side): torch.ones(shape)
        for layer in range(8)
        for side, shape in sides.items()
    }
    target.mkdir()
    save_file(tensors, target / "adapters.safetensors")
    settings = {"rank": 4, "scale": 2.0, "dropout": 0.0}
    config = {"fine_tune_type": "lora", "lora_parameters": settings, "num_layers": 8}
    (target / "adapter_config.json").write_text(json.dumps(config))


METRICS = lines({"iteration": 1, "loss": 2.5}, {"iteration": 2, "loss": 2.25})


def swift(target: Path) -> None:
    """A run of ms-swift, with the config.json of the same model beside."""
    model = target.parent / f"{target.name}-model"
    megaconv.convert(FIXTURES / "dist-llama-tp2pp2", model, saver="hf")
    write_swift(target, exported=model)


def write_qwen3(target: Path) -> None:
    """A small Qwen 3."""
    settings = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    write_llama(target, ffn=64, extra_config=settings)


def larger_tokenizer(model: Path) -> Make:
    """The tokenizer of a model with one more token."""

    def write(target: Path) -> None:
        from tokenizers import Tokenizer

        made = Tokenizer.from_file(str(model / "tokenizer.json"))
        made.add_special_tokens(["<tool>"])
        target.mkdir(parents=True)
        made.save(str(target / "tokenizer.json"))

    return write


def usual(llama: Path) -> dict[str, Make]:
    """The files and directories that commands of any page name -> how to make a small one."""
    llamas = (
        "BASE",
        "Llama-2-7b",
        "Llama-2-70B",
        "Llama-2-70b",
        "Llama-3-8B",
        "Llama-3.1-8B",
        "meta-llama/Llama-3.1-8B",
    )
    chats = (
        "Llama-3.2-1B",
        "Llama-3.2-1B-Instruct",
        "Llama-3.1-8B-Instruct",
        "Qwen3-0.6B",
        "Qwen3-8B",
        "chat",
    )
    optimizer = fixture("core-te-llama-optim-tp2pp1/checkpoint")
    return {
        **dict.fromkeys((*llamas, *chats), copy_of(llama)),
        "ckpt": converted(llama, "--saver", "core", "--tp", "2"),
        "my-tokenizer": larger_tokenizer(llama),
        "Qwen3-30B-A3B": mixture(llama, 40, "--moe-upcycling-granularity", "4"),
        "Mixtral-8x7B": mixture(llama, 8),
        "my-adapter": write_adapter,
        "mlx-adapter": write_mlx_adapter,
        "run": optimizer,
        "ict": fixture("biencoder-legacy-separate"),
        "retro-ckpt": fixture("retro-tp2-torch"),
        "chats.jsonl": lines(*[CHAT] * 8),
        "pairs.jsonl": lines(*[PAIR] * 8),
        "rated.jsonl": lines(*RATED * 2),
        "corpus.jsonl": lines(*[{"text": "A checkpoint is a model at rest."}] * 20),
        "rows.jsonl": lines({"text": "A checkpoint"}),
        **dict.fromkeys(("metrics.jsonl", "run-a/metrics.jsonl", "run-b/metrics.jsonl"), METRICS),
        "lambada_test.jsonl": lines({"text": "A checkpoint is a model at rest"}),
        "Qwen2.5-VL-7B": fixture("whole-qwen2_5_vl"),
        **dict.fromkeys(
            ("Qwen2.5-VL-3B", "Qwen2.5-VL-3B-Instruct", "Qwen2.5-VL-7B-Instruct"),
            partial(create, "qwen2_5_vl"),
        ),
        "gemma-3-4b-it": fixture("whole-qwen2_5_vl"),
        "Llama-3.2-11B-Vision": fixture("whole-qwen2_5_vl"),
        "gemma-4-31B": multimodal(llama),
        "bert-base-uncased": bert,
        "t5": fixture("pipelined-t5-tp1e2d2/checkpoint"),
        "old-zarr": fixture("zarr-llama-tp2pp2/checkpoint"),
        "titan/step-1000": converted(llama, "--saver", "dcp", "--option", "names=torchtitan"),
        "model.gguf": gguf(llama),
        "model-mlx": converted(
            llama, "--saver", "mlx", "--option", "bits=4", "--option", "group_size=32"
        ),
        "checkpoint-500": fixture("deepspeed-zero2-llama-tied-groups-dp2/checkpoint"),
        "global_step_100/actor": fixture("verl-fsdp1-qwen2-dp3/actor"),
        "verl-run/actor": verl_actor,
        "Skywork-Reward-Llama-3.1-8B": rewarding(llama),
        "my-reward-adapter": write_reward_adapter,
        "global_step_100/critic/dist_ckpt": critic(llama),
        "global_step_100/critic/huggingface": copy_of(llama),
        "checkpoints/epoch_0_step_99/model": partial(write_automodel, llama),
        "output/checkpoint-100": swift,
        "results/checkpoints": lambda target: write_bridge(target, "dist-llama-tp2pp2"),
        "nemo/llama3-8b": lambda target: write_nemo(target, "dist-llama-tp2pp2"),
    }


def verl_actor(target: Path) -> None:
    """The checkpoint of a verl run that saved the model's config.json too."""
    saved = FIXTURES / "verl-megatron-tp2pp2"
    shutil.copytree(saved / "actor", target)
    shutil.copytree(saved / "huggingface", target / "model/huggingface")


def patch_of_seed(seed: int, target: Path) -> None:
    """A patch between two models with random weights of neighbouring seeds."""
    with TemporaryDirectory() as directory:
        old, new = (write_llama(Path(directory, str(each)), seed=each) for each in (seed - 1, seed))
        megaconv.delta(old, new, target)


QUERIES = [
    {"query": text, "pos": [f"The answer to {text}"], "neg": ["Something else"]}
    for text in ("one", "two", "three", "four")
]
PASSAGES = [{"id": number, "title": "", "text": f"Passage {number}"} for number in range(4)]
REWARDS = """
def correct(completions, answer, **columns):
    return [float(right in text) for text, right in zip(completions, answer)]


def brief(completion_ids, **columns):
    return [-len(ids) / 1000 for ids in completion_ids]
"""


def write_prompts(target: Path) -> None:
    """Prompts, and reward functions beside them."""
    lines(*[{"prompt": "What?", "answer": "model"}] * 4)(target)
    (target.parent / "rewards.py").write_text(REWARDS)


def write_image_chats(target: Path) -> None:
    """Chats with their images beside them."""
    write_chats(target.parent)
    if target.name != "chats.jsonl":
        shutil.copy(target.parent / "chats.jsonl", target)


def write_whisper(target: Path) -> None:
    """A model of an architecture that no family has."""
    write_llama(target, extra_config={"architectures": ["WhisperForConditionalGeneration"]})


def special(page: str) -> Mapping[str, Make]:
    """Files that one page needs in another form than usual."""
    pages: dict[str, Mapping[str, Make]] = {
        "docs/many-machines.md": {
            "Llama-3.1-405B": lambda target: write_llama(target, layers=16, kv_heads=8)
        },
        "docs/trainer-parallelism.md": {
            "Llama-3.1-405B": lambda target: write_llama(target, layers=18, kv_heads=8),
            "Llama-3.1-8B-Instruct": published("meta-llama/Llama-3.1-8B-Instruct"),
        },
        "docs/trainer-encoders.md": {"ckpt": core_bert},
        "docs/delta.md": {
            name: partial(write_llama, seed=seed)
            for seed, name in enumerate(("first", "second", "third"))
        }
        | {
            "ckpt/iter_0000100": partial(write_llama, seed=0),
            "ckpt/deltas/iter_0000200": partial(patch_of_seed, 1),
            "ckpt/deltas/iter_0000300": partial(patch_of_seed, 2),
        },
        "docs/average.md": {
            **{f"run/iter_{number:07}": saved(number) for number in (800, 900, 1000)},
            **{
                name: partial(write_llama, seed=seed)
                for seed, name in enumerate(
                    (
                        "Llama-2-7b",
                        "tuned",
                        "other-run",
                        "base",
                        "math",
                        "code",
                        "chat-a",
                        "chat-b",
                    )
                )
            },
        },
        "docs/change.md": {
            "Mistral-7B": partial(write_llama, layers=32, ffn=64),
            "math": partial(write_llama, layers=32, ffn=64, seed=1),
            "code": partial(write_llama, layers=32, ffn=64, seed=2),
            "Qwen3-8B": write_qwen3,
            "kept.json": lines({"keep": {"layers.0": [*range(8)], "layers.1": [*range(8)]}}),
            "channels.json": lines({"keep": {"hidden": [*range(16)]}}),
        },
        "docs/planning.md": {
            "DeepSeek-V3": published("deepseek-ai/DeepSeek-V3"),
            "Llama-3.1-405B": published("meta-llama/Meta-Llama-3.1-405B"),
        },
        "docs/families.md": {"whisper-large": write_whisper},
        "docs/hybrids.md": {"Qwen3-Next": lambda target: write_model(target, "qwen3_next")},
        "docs/images.md": {
            **dict.fromkeys(("chats.jsonl", "more-chats.jsonl"), write_image_chats),
            "prompts.jsonl": write_prompts,
        },
        "docs/grpo.md": {"prompts.jsonl": write_prompts},
        "docs/embedding-models.md": {
            "queries.jsonl": lines(*QUERIES),
            "passages.jsonl": lines(*PASSAGES),
            "texts.txt": lambda target: target.write_text("A text\nAnother one\n"),
        },
        "docs/distillation.md": {"prompts.jsonl": write_prompts},
        "docs/data.md": {
            "lambada_test.jsonl": lines(
                {"text": "A checkpoint is a model at rest, and a run is one in motion"}
            )
        },
    }
    return pages.get(page, {})


def reasons(command: Command) -> list[str]:
    """The reasons why no test runs a command."""
    return [
        reason
        for reason, found in NOT_RUN.items()
        if any(re.search(each, command.plain) for each in found)
    ]


def runs_elsewhere(command: Command) -> bool:
    return any(re.search(page, command.page) for page in ELSEWHERE)


COMMANDS = [command for command in all_commands() if not runs_elsewhere(command)]
RUN = [command for command in COMMANDS if not reasons(command)]
RUN_PAGES = list(dict.fromkeys(command.page for command in RUN))


def names_in(command: Command) -> set[str]:
    """The words of a command that may name files, without the share of a model: `tuned:0.6`."""
    words = re.findall(r"[^\s'\"=]+", command.plain)
    return {re.sub(r":[\d.]+$", "", word) for word in words}


def outputs(command: Command) -> set[str]:
    """The directory that a command writes. It must not exist before."""
    named = re.findall(r"--(?:save|save-dir|dir) (\S+)", command.plain)
    positional = re.findall(r"megaconv convert ([^-]\S*) ([^-]\S*)", command.plain)
    return {*named, *(target for _, target in positional)}


def inputs(command: Command) -> set[str]:
    """The checkpoints that a command reads."""
    named = re.findall(r"--(?:load|load-dir|config|base|adapter) (\S+)", command.plain)
    positional = re.findall(
        r"megaconv (?:convert|inspect|plan|fingerprint|verify|merge|diff) ([^-]\S*)", command.plain
    )
    return {*named, *positional}


def prepare(command: Command, place: Path, made: Mapping[str, Make]) -> None:
    """Make the files that a command reads, and remove what it writes."""
    for name in outputs(command):
        shutil.rmtree(place / name, ignore_errors=True)
    for name in sorted(names_in(command) & made.keys() - outputs(command)):
        if not (place / name).exists():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            made[name](place / name)
            assert (place / name).exists(), name


def page_parameters() -> list[object]:
    return [
        pytest.param(page, marks=[] if page in AT_ONCE else [pytest.mark.slow])
        for page in RUN_PAGES
    ]


@pytest.mark.parametrize("page", page_parameters())
def test_the_commands_of_a_page_run(
    page: str, llama: Path, shell: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other in a directory, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    made = {**usual(llama), **special(page)}
    for command in RUN:
        if command.page == page:
            prepare(command, tmp_path, made)
            run_documented(command, tmp_path, shell, 300)


def test_every_reason_applies_to_a_command() -> None:
    plain = [command.plain for command in all_commands()]
    unused = [
        each
        for found in NOT_RUN.values()
        for each in found
        if not any(re.search(each, text) for text in plain)
    ]
    assert unused == []


def test_every_command_is_one_of_a_known_program() -> None:
    """A new block of another language or program needs a runner, or a reason in NOT_RUN."""
    known = re.compile(r"^(\w+=\S+ )?(megaconv|megatron-lite|torchrun|python|cat|cmp|xargs) ")
    assert [command.plain for command in RUN if not known.match(command.plain)] == []


@pytest.mark.parametrize("page", RUN_PAGES)
def test_every_checkpoint_that_a_command_reads_is_known(page: str) -> None:
    """Another name needs a small checkpoint in `usual`, or an earlier command of the page that writes it."""
    known = {*usual(Path()), *special(page)}
    for command in RUN:
        if command.page == page:
            parents = {name.split("/")[0] for name in inputs(command)}
            assert inputs(command) <= known or parents <= known, command.plain
            known |= outputs(command)


def test_every_block_of_commands_has_a_language() -> None:
    """The tests would not find the commands of a block without a language."""
    programs = r"(\$ |(\w+=\S+ )?(megaconv|megatron-lite|torchrun|python|pip|make|docker|srun) )"
    unmarked = re.compile(rf"^```\n{programs}", re.MULTILINE)
    pages = {str(page): page.read_text() for page in PAGES}
    blocks = {
        name: re.split(r"^```$\n(?=\n|\Z)", text, flags=re.MULTILINE)
        for name, text in pages.items()
    }
    assert [
        name for name, texts in blocks.items() if any(unmarked.search(text) for text in texts)
    ] == []


def test_the_commands_of_a_how_to_page_that_are_not_run_have_a_reason() -> None:
    """Such a command is in a `bash` block."""
    commands = [command for command in all_commands() if command.page.startswith("docs/how-to/")]
    assert [
        command.plain for command in commands if command.language == "bash" and not reasons(command)
    ] == []

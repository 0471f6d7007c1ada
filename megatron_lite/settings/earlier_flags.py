"""Flags of earlier releases of Megatron-LM and of its tools: today's flags for them, or the reason why there are none."""

from collections.abc import Mapping, Sequence

from megaconv.errors import UsageError

TODAY = {
    "--model-parallel-size": ("--tensor-model-parallel-size",),
    "--warmup": ("--lr-warmup-fraction",),
    "--recompute-activations": ("--recompute-granularity", "selective"),
    "--checkpoint-activations": (
        "--recompute-granularity", "full", "--recompute-method", "uniform",
    ),
    "--checkpoint-num-layers": ("--recompute-num-layers",),
    "--use-rotary-position-embeddings": ("--position-embedding-type", "rope"),
    "--hybrid-layer-pattern": ("--hybrid-override-pattern",),
    "--dist-ckpt-format": ("--ckpt-format",),
    "--no-pad-vocab-size": ("--make-vocab-size-divisible-by", "1"),
    "--disable-pad-vocab-size": ("--make-vocab-size-divisible-by", "1"),
}  # fmt: skip
"""An earlier flag -> today's flags with the same meaning. The value of an earlier flag belongs to the last of them."""

OF_COMMANDS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "evaluate": {  # run_gpt2_eval.py of 2019
        "--model-path": ("--load",),
        "--batch-size": ("--micro-batch-size",),
        "--cloze-eval": ("--task", "LAMBADA"),
        "--webtext-eval": ("--webtext-eval",),
    },
    "embed": {  # create_doc_index.py
        "--ict-load": ("--load",),
        "--block-data-path": ("--output",),
        "--batch-size": ("--micro-batch-size",),
        "--indexer-log-interval": ("--log-interval",),
        "--indexer-batch-size": ("--indexer-batch-size",),
    },
}
"""A command -> flags of Megatron's tool that it replaces, in the form of TODAY."""

_ONE_DTYPE = "all weights have the same dtype, and main weights are fp32 with --fp16 and --bf16; leave it out"
_JSON_KEYS = "preprocess reads text; give it --json-keys"
_SHARDED = "leave it out, and give --data-parallel-sharding-strategy optim_grads_params"
_EMBED = "a biencoder is indexed by a command of its own; give the flag to `megatron-lite embed`"

REPLACED = {
    "--batch-size": "give --micro-batch-size (sequences of one data-parallel rank, as in Megatron-LM's scripts) or --global-batch-size",
    "--num-microbatches-in-minibatch": "--global-batch-size determines the number of microbatches; give it",
    "--max-preds-per-seq": "--mask-prob determines the number of masked tokens; leave it out",
    "--fp32-embedding": _ONE_DTYPE,
    "--fp32-layernorm": _ONE_DTYPE,
    "--fp32-tokentypes": _ONE_DTYPE,
    "--presplit-sentences": "preprocess splits texts into sentences; give it --split-sentences or --presplit-sentences",
    "--tokenizer-model-type": "give --tokenizer-type HuggingFaceTokenizer --tokenizer-model NAME",
    "--text-key": _JSON_KEYS,
    "--loose-json": _JSON_KEYS,
    "--use-tfrecords": "TFRecords can't be read; preprocess makes data from text",
    "--model-path": "give --load; `megatron-lite evaluate` takes --model-path too",
    "--cloze-eval": "give `megatron-lite evaluate` --task LAMBADA, with --valid-data for the file",
    "--tasks": "give `megatron-lite evaluate` --lm-eval with the names of lm-eval's tasks, separated by blanks",
    "--webtext-eval": "give it to `megatron-lite evaluate`, with --corpus for the file",
    "--ckpt-step": "give the directory of the iteration, such as --load run/iter_0000100",
    "--skip-train": "`megatron-lite evaluate` evaluates without training; use it",
    "--use-megatron-fsdp": _SHARDED,
    "--use-torch-fsdp2": _SHARDED,
    "--sft": "give --finetune-data to finetune, which reads chats",
    "--sft-tokenizer-prompt-format": "finetune uses the tokenizer's own chat template; leave it out",
    "--data-args-path": "give the words of the file to --data-path",
    "--per-split-data-args-path": "give the words of the file to --train-data-path, --valid-data-path and --test-data-path",
    **dict.fromkeys(
        ("--perform-rl-step", "--langrl-env-config", "--refit-method"),
        "finetune learns from rewards with --grpo; give its flags",
    ),
    **dict.fromkeys(
        ("--export-kd-teacher-load", "--export-kd-cfg", "--export-kd-teacher-model-config", "--export-kd-teacher-ckpt-format"),
        "pretrain and finetune learn from a teacher with --teacher-load; give its flags",
    ),
    **dict.fromkeys(
        (
            "--ict-load", "--block-data-path", "--indexer-batch-size", "--indexer-log-interval",
        ),
        _EMBED,
    ),
}  # fmt: skip
"""A flag that has no counterpart with the same value -> what to do instead."""


def with_todays_flags(words: Sequence[str], command: str = "pretrain") -> list[str]:
    """Return a command line with today's flags. Raises UsageError for flags of REPLACED that the command doesn't know."""
    today = {**TODAY, **OF_COMMANDS.get(command, {})}
    found: list[str] = []
    refused: list[str] = []
    for word in words:
        name, equals, value = word.partition("=")
        if name in REPLACED and name not in today:
            refused.append(f"{name}: {REPLACED[name]}")
        *first, last = today.get(name, (name,))
        found += [*first, last + equals + value]
    refuse_all(refused)
    return found


def refuse_all(messages: Sequence[str]) -> None:
    """Raise one UsageError for all flags that can't be taken, so that nobody has to find them one after another."""
    if len(messages) == 1:
        raise UsageError(messages[0])
    if messages:
        listed = ". ".join(messages).replace("?.", "?")
        raise UsageError(f"{len(messages)} flags can't be taken. {listed}")

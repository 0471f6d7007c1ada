"""Settings of what is learned, and from what: data and tokenizer, pairs, hidden words, tasks, adapters. As config.py has all others."""

from dataclasses import dataclass

from megatron_lite.settings.flag import flag


@dataclass(frozen=True)
class Data:
    """Data"""

    data_path: tuple[str, ...] | None = flag(None, "[WEIGHT] PREFIX ...: indexed data sets, blended")
    train_data_path: tuple[str, ...] | None = flag(None, "the same, for training alone")
    valid_data_path: tuple[str, ...] | None = flag(None, "the same, for evaluation")
    test_data_path: tuple[str, ...] | None = flag(None, "the same, for the test at the end")
    finetune_data: tuple[str, ...] | None = flag(
        None,
        "files of examples: chats, instructions, prompts with completions, texts; as JSON lines, JSON arrays, parquet, plain text",
    )
    valid_finetune_data: tuple[str, ...] | None = flag(None, "the same, for evaluation")
    finetune_form: str | None = flag(
        None, "the form of the records, where they have the fields of several",
        choices=("messages", "conversations", "alpaca", "prompt", "text"),
    )  # fmt: skip
    finetune_turns: str = flag("all", "which of the assistant's turns are learned", choices=("all", "last"))
    chat_template: str | None = flag(None, "file with a chat template (the tokenizer's own)")
    show_sample: bool = flag(False, "print the first sample of --finetune-data, and what of it is learned")
    split: str | None = flag(None, "parts of --data-path for training, evaluation, test: 969,30,1")
    data_cache_path: str | None = flag(None, "where indices of samples are kept")
    mock_data: bool = flag(False, "random tokens")
    tokenizer_type: str | None = flag(None, "kind of tokenizer")
    tokenizer_model: str | None = flag(None, "the tokenizer's file or directory (the checkpoint's)")
    vocab_file: str | None = flag(None, "vocabulary of a GPT-2 or BERT tokenizer")
    merge_file: str | None = flag(None, "merges of a GPT-2 tokenizer")
    reset_position_ids: bool = flag(False, "positions begin anew with each document")
    reset_attention_mask: bool = flag(False, "documents don't see each other")
    eod_mask_loss: bool = flag(False, "no loss on the ends of documents")


@dataclass(frozen=True)
class Dpo:
    """DPO; learn from pairs of answers which of them is preferred"""

    dpo: bool = flag(
        False, "--finetune-data are pairs of a chosen and a rejected answer; the reference model is --load"
    )
    dpo_beta: float = flag(0.1, "how much the reference holds: rewards are beta x log-probabilities over its own")
    dpo_loss: str = flag("sigmoid", "the loss of a pair", choices=("sigmoid", "hinge", "ipo"))
    dpo_label_smoothing: float = flag(0.0, "how probable it is that a pair is the wrong way round, below 0.5")
    dpo_reference_cache: str | None = flag(
        None,
        "directory that keeps the reference's log-probabilities, for runs that go on (they are computed at each start)",
    )


@dataclass(frozen=True)
class Masked:
    """Hidden words, for --model-type bert and t5 on what preprocess --split-sentences made"""

    mask_prob: float = flag(0.15, "part of a sample's tokens that is hidden")
    short_seq_prob: float = flag(0.1, "of a sample that is made shorter on purpose")
    vocab_extra_ids: int = flag(
        100, "of a T5: tokens added to a BERT vocabulary, each of which stands for a run of hidden words"
    )


@dataclass(frozen=True)
class Tasks:
    """Tasks of Megatron-LM's tasks/main.py: finetune --model-type bert on pairs of sentences, or on questions with choices"""

    task: str | None = flag(
        None,
        "what is learned; it says what the files are and gives the model its head",
        choices=("MNLI", "QQP", "RACE"),
    )
    train_data: tuple[str, ...] | None = flag(
        None, "its files (MNLI, QQP: tab-separated) or directories (RACE: of *.txt with JSON lines)"
    )
    valid_data: tuple[str, ...] | None = flag(
        None, "the same; after each epoch it is said how much of each is answered right"
    )
    keep_last_batch: bool = flag(
        False,
        "an epoch's last examples, too few for a batch, make a smaller one (Megatron's --keep-last, which is taken for it too)",
    )
    pretrained_checkpoint: str | None = flag(
        None, "what to start from where --load is not given, or holds no checkpoint; else that run is continued"
    )


@dataclass(frozen=True)
class Lora:
    """LoRA; adapters are trained and saved, the model's weights stay as they are"""

    lora_rank: int | None = flag(None, "train adapters of this rank")
    lora_alpha: float | None = flag(None, "their products are multiplied with alpha / rank (2 x rank)")
    lora_targets: tuple[str, ...] = flag(
        ("all-linear",),
        "modules that have one, by the ends of their names: q_proj, mlp.down_proj, linear_fc1, or all-linear",
    )
    lora_dropout: float = flag(0.0, "dropout of what adapters see")
    lora_rslora: bool = flag(False, "divide alpha by the rank's square root")
    lora_load: str | None = flag(None, "adapter to go on from, as peft saves it; it says rank, alpha and modules")

    @property
    def wanted(self) -> bool:
        return self.lora_rank is not None or self.lora_load is not None

"""Settings of the training data and objective: data and tokenizer, pairs, masked words, tasks, adapters.

They have the form of the settings in config.py.
"""

from dataclasses import dataclass

from megatron_lite.settings.flag import flag


@dataclass(frozen=True)
class Data:
    """Data"""

    data_path: tuple[str, ...] | None = flag(
        None,
        "[WEIGHT] PREFIX ...: indexed data sets, blended; --split divides them. A prefix may be a URI of a store",
        samples=True,
        remote=True,
    )
    train_data_path: tuple[str, ...] | None = flag(
        None, "indexed data sets for training, blended", samples=True, remote=True
    )
    valid_data_path: tuple[str, ...] | None = flag(
        None, "indexed data sets for evaluation, blended", samples=True, remote=True
    )
    test_data_path: tuple[str, ...] | None = flag(
        None, "indexed data sets for the test at the end, blended", samples=True, remote=True
    )
    corpora: str | None = flag(
        None,
        "YAML file of corpora: names, each with a path and perhaps a weight, for the flags above (default: $MEGATRON_LITE_CORPORA)",
        samples=True,
    )
    finetune_data: tuple[str, ...] | None = flag(
        None,
        "files or directories of examples in JSON, parquet or plain text: chats, instructions, prompts with completions, texts",
        samples=True,
    )
    valid_finetune_data: tuple[str, ...] | None = flag(
        None, "files or directories of examples for evaluation"
    )
    finetune_form: str | None = flag(
        None, "form of the records, if they have the fields of several forms",
        choices=("messages", "conversations", "alpaca", "prompt", "text"),
        samples=True,
    )  # fmt: skip
    finetune_turns: str = flag(
        "all", "assistant turns that are learned", choices=("all", "last"), samples=True
    )
    finetune_loss: str = flag(
        "nll",
        "loss of the learned tokens: cross entropy (nll), or the same times the token's probability (dft)",
        choices=("nll", "dft"),
        samples=True,
    )
    chat_template: str | None = flag(
        None, "file with a chat template (default: the tokenizer's own)"
    )
    image_encoder: str | None = flag(
        None,
        "multimodal model whose encoder reads the images in --finetune-data, and is not trained: a directory of Hugging Face's files "
        "(default: --load, if it is one)",
        samples=True,
    )
    show_sample: bool = flag(
        False, "print the first sample of --finetune-data and its learned parts"
    )
    split: str | None = flag(
        None,
        "shares of --data-path for training, evaluation and test (default: 969,30,1)",
        samples=True,
    )
    data_cache_path: str | None = flag(
        None, "directory that keeps the indices of samples, and data of a store"
    )
    data_cache_size: str = flag(
        "16GB", "size of the file in --data-cache-path with data of a store"
    )
    mock_data: bool = flag(False, "generated tokens instead of data", samples=True)
    tokenizer_type: str | None = flag(None, "kind of tokenizer")
    tokenizer_model: str | None = flag(
        None, "the tokenizer's file or directory (default: the checkpoint's)", remote=True
    )
    vocab_file: str | None = flag(None, "vocabulary of a GPT-2 or BERT tokenizer")
    merge_file: str | None = flag(None, "merges of a GPT-2 tokenizer")
    reset_position_ids: bool = flag(False, "restart positions with each document", samples=True)
    reset_attention_mask: bool = flag(
        False, "restrict attention to a token's own document", samples=True
    )
    eod_mask_loss: bool = flag(
        False, "no loss for the prediction after an end of document", samples=True
    )


WITH_REFERENCE, WITHOUT_REFERENCE = ("sigmoid", "hinge", "ipo"), ("simpo", "orpo")
"""Losses of pairs: those that compare with a reference model, and the others."""


@dataclass(frozen=True)
class Dpo:
    """DPO: learning from pairs of answers"""

    dpo: bool = flag(
        False,
        "--finetune-data holds pairs of a chosen and a rejected answer; the reference model is --load",
        samples=True,
    )
    dpo_beta: float = flag(
        0.1,
        "strength of the reference: rewards are beta x (log-probability minus the reference's)",
        samples=True,
    )
    dpo_loss: str = flag(
        "sigmoid",
        "loss of a pair; simpo and orpo have no reference model",
        choices=(*WITH_REFERENCE, *WITHOUT_REFERENCE),
        samples=True,
    )
    simpo_gamma: float = flag(
        0.5, "simpo: the margin by which the chosen answer has to win", samples=True
    )
    dpo_label_smoothing: float = flag(
        0.0, "probability that chosen and rejected are swapped, below 0.5", samples=True
    )
    dpo_reference_cache: str | None = flag(
        None,
        "directory that keeps the reference's log-probabilities for later runs (default: none; each start computes them)",
    )


@dataclass(frozen=True)
class Kto:
    """KTO: learning from answers that are rated good or bad"""

    kto: bool = flag(
        False,
        '--finetune-data holds answers with a "label", true or false, or pairs; the reference model is --load',
        samples=True,
    )
    kto_beta: float = flag(
        0.1,
        "strength of the reference: rewards are beta x (log-probability minus the reference's)",
        samples=True,
    )
    kto_desirable_weight: float = flag(1.0, "factor of the loss of good answers", samples=True)
    kto_undesirable_weight: float = flag(1.0, "factor of the loss of bad answers", samples=True)
    kto_reference_cache: str | None = flag(
        None,
        "directory that keeps the reference's log-probabilities for later runs (default: none; each start computes them)",
    )


@dataclass(frozen=True)
class Rewards:
    """Reward modeling: a head of scores learns from pairs of answers"""

    reward_modeling: bool = flag(
        False,
        "--finetune-data holds pairs of a chosen and a rejected answer; --load is a reward model, or a language model whose head for "
        "words a new head of scores replaces",
        samples=True,
    )
    center_rewards_coefficient: float = flag(
        0.0,
        "coefficient of the squared sum of a pair's scores, which keeps scores near 0",
        samples=True,
    )


@dataclass(frozen=True)
class Masked:
    """Masked words, for --model-type bert and t5 on data from preprocess --split-sentences"""

    mask_prob: float = flag(0.15, "fraction of a sample's tokens that is masked", samples=True)
    short_seq_prob: float = flag(0.1, "probability of a shorter sample", samples=True)
    vocab_extra_ids: int = flag(
        100,
        "T5: sentinel tokens that are added to a BERT vocabulary, one for each masked span",
        samples=True,
    )


@dataclass(frozen=True)
class Tasks:
    """Tasks of Megatron-LM's tasks/main.py: finetune a BERT on pairs of sentences or multiple choice, a retriever on questions"""

    task: str | None = flag(
        None,
        "task to learn; it determines the form of the files and the model's head",
        choices=("MNLI", "QQP", "RACE", "RET-FINETUNE-NQ"),
        samples=True,
    )
    train_data: tuple[str, ...] | None = flag(
        None,
        "files of the task (MNLI, QQP: tab-separated; RET-FINETUNE-NQ: JSON as DPR's) or directories (RACE: *.txt with JSON lines)",
        samples=True,
    )
    valid_data: tuple[str, ...] | None = flag(
        None, "files or directories for evaluation; each epoch reports the accuracy of each of them"
    )
    keep_last_batch: bool = flag(
        False,
        "keep the last examples of an epoch as a smaller batch (Megatron's --keep-last without a number means this too)",
        samples=True,
    )
    pretrained_checkpoint: str | None = flag(
        None, "start of a run if --load is missing or holds no checkpoint; else the run of --load is continued",
        remote=True,
    )  # fmt: skip


@dataclass(frozen=True)
class OtherObjective:
    """Objectives of other packages"""

    objective: str | None = flag(
        None,
        "name of an installed package's training objective (docs/plugins.md)",
        samples=True,
    )


@dataclass(frozen=True)
class Lora:
    """LoRA: training adapters of a frozen model"""

    lora_rank: int | None = flag(None, "train adapters of this rank")
    lora_alpha: float | None = flag(
        None, "adapters are multiplied by alpha / rank (default: 2 x rank)"
    )
    lora_targets: tuple[str, ...] = flag(
        ("all-linear",),
        "adapted modules, by the ends of their names: q_proj, mlp.down_proj, linear_fc1, or all-linear",
    )
    lora_dropout: float = flag(0.0, "dropout of the input of adapters")
    lora_rslora: bool = flag(False, "divide alpha by the square root of the rank")
    lora_dora: bool = flag(
        False, "DoRA: train the length of each row of an adapted matrix beside its adapter"
    )
    lora_modules_to_save: tuple[str, ...] = flag(
        (),
        "modules that are trained and saved whole beside the adapters: embed_tokens, lm_head",
    )
    lora_trainable_token_indices: tuple[str, ...] = flag(
        (),
        "tokens whose rows of embedding and head are trained alone: 128256 128257, or 128256-128300",
    )
    lora_load: str | None = flag(
        None,
        "adapter to start from, as peft saves it; it sets rank, alpha and modules",
        remote=True,
    )

    @property
    def wanted(self) -> bool:
        """True if the run trains adapters."""
        return self.lora_rank is not None or self.lora_load is not None

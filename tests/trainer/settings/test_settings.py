"""Flags, YAML, help; the model from flags or from a checkpoint; sizes that can't be."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megaconv.errors import (
    CheckpointError,
    LayoutError,
    NotExpressible,
    UnknownFamily,
    UsageError,
)
from megaconv.model.config import ModelConfig
from megatron_lite import cli
from megatron_lite.processes.launch import start
from megatron_lite.settings.architecture import check_against, model_from_flags, model_type
from megatron_lite.settings.arguments import (
    flag_table,
    make_parser,
    parse,
)
from megatron_lite.settings.config import flags
from megatron_lite.settings.contradictions import check_flags
from megatron_lite.settings.kinds import check_kind
from megatron_lite.settings.megatron_flags import ANY_NUMBER, NOT_YET, WITHOUT_EFFECT
from megatron_lite.settings.options import ModelOptions
from megatron_lite.settings.parallel import Parallel
from megatron_lite.settings.run_options import optimizer_options
from megatron_lite.settings.sizes import Sizes, work_out
from tests.trainer.loop.launches import DEEPSEEK

ROOT = Path(__file__).parents[3]
LLAMA = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --group-query-attention --num-query-groups 2 --seq-length 32 "
    "--normalization RMSNorm --position-embedding-type rope --swiglu --disable-bias-linear --untie-embeddings-and-output-weights "
    "--train-iters 10 --lr 1e-3"
)


def settings(text: str):
    return parse("pretrain", text.split())[0]


def sizes(text: str, world: int) -> Sizes:
    found = settings(f"{LLAMA} {text}")
    options = ModelOptions(sequence_parallel=found.parallel.sequence_parallel)
    return work_out(found, model_from_flags(found, 100), options, world)


def test_a_torch_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.8.0+cpu")
    with pytest.raises(UsageError, match=r"needs torch 2\.9 or newer, found 2\.8\.0\+cpu"):
        start(Parallel())


def test_every_flag_is_documented_as_help_says_it() -> None:
    assert flag_table() in (ROOT / "docs" / "trainer-flags.md").read_text(encoding="utf-8")
    assert all(item.metadata["help"] for _, item in flags().values())


def test_help_is_grouped_by_subject_has_examples_and_needs_no_torch() -> None:
    text = make_parser("pretrain").format_help()
    for heading in ("Parallelism:", "Optimizer and learning rate:", "Checkpoints:", "examples:"):
        assert heading in text
    code = "import sys; from megatron_lite.cli import main\ntry: main(['pretrain', '--help'])\nfinally: assert 'torch' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "--tensor-model-parallel-size" in done.stdout


@pytest.mark.parametrize("name", sorted(flags()))
def test_every_flag_is_read_with_its_own_type(name: str) -> None:
    subject, item = flags()[name]
    values = {
        "bool": ("", True), "int | None": ("3", 3), "int": ("3", 3), "float | None": ("0.5", 0.5), "float": ("0.5", 0.5),
        "str | None": ("word", "word"), "str": ("word", "word"), "tuple[int, ...] | None": ("1 2 3", (1, 2, 3)),
        "tuple[str, ...] | None": ("0.5 a", ("0.5", "a")), "tuple[str, ...]": ("0.5 a", ("0.5", "a")),
        "tuple[float, ...]": ("0.5 1", (0.5, 1.0)), "tuple[float, ...] | None": ("0.5 1", (0.5, 1.0)),
        "tuple[int, ...]": ("1 2 3", (1, 2, 3)),
    }  # fmt: skip
    kind = (
        item.type if isinstance(item.type, str) else getattr(item.type, "__name__", str(item.type))
    )
    kind = str(item.type) if "|" in str(item.type) or "[" in str(item.type) else kind
    text, expected = values[kind]
    if item.metadata["choices"]:
        text = expected = [*item.metadata["choices"]][-1]
    found = settings(f"--{name.replace('_', '-')} {text}")
    assert getattr(getattr(found, subject), name) == expected
    assert found.given == {name}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--tensor-model-paralel-size 2", "did you mean --tensor-model-parallel-size"),
        ("--lr high", "invalid float value: 'high'"),
        ("--normalization Batch", "invalid choice: 'Batch'"),
        ("--dataloader-type=cyclic", "--dataloader-type cyclic is not available"),
        (
            "--moe-token-dispatcher-type=flex",
            "invalid choice: 'flex' (choose from 'alltoall', 'allgather')",
        ),
        ("--bf16 perhaps", "expected true or false"),
        ("--muon-use-syrk", "--muon-use-syrk: a kernel of its own is not supported yet"),
        ("7", "is not a flag"),
    ],
)
def test_a_flag_that_is_wrong_is_refused_with_what_was_probably_meant(
    words: str, message: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        settings(words)


def test_flags_of_megatron_that_choose_nothing_here_are_accepted_and_named() -> None:
    values = {ANY_NUMBER: " x y z"}
    words = [
        f"--{name.replace('_', '-')}" + values.get(count, " x" * count)
        for name, count in WITHOUT_EFFECT.items()
    ]
    words += [f"--{name.replace('_', '-')} {value}" for name, value in NOT_YET.items()]
    found, ignored = parse("pretrain", " ".join([*words, "--lr 1"]).split())
    assert (found.optimizer.lr, found.given, len(ignored)) == (1.0, {"lr"}, len(words))


EXAMPLES_OF_MEGATRON = {
    "gpt3 175B": """
        num-layers hidden-size num-attention-heads seq-length max-position-embeddings attention-backend micro-batch-size
        global-batch-size rampup-batch-size train-iters weight-decay adam-beta1 adam-beta2 init-method-std clip-grad fp16 lr
        lr-decay-style min-lr lr-warmup-fraction lr-decay-iters tensor-model-parallel-size pipeline-model-parallel-size data-path
        vocab-file merge-file split log-interval save-interval eval-interval save load eval-iters tensorboard-dir
        """,
    "llama3 8B": """
        use-mcore-models num-layers hidden-size ffn-hidden-size num-attention-heads group-query-attention num-query-groups
        kv-channels seq-length max-position-embeddings position-embedding-type rotary-base rotary-percent attention-dropout
        hidden-dropout swiglu init-method-std attention-backend apply-layernorm-1p untie-embeddings-and-output-weights
        disable-bias-linear micro-batch-size global-batch-size train-samples lr-decay-samples lr-warmup-samples lr min-lr
        decoupled-lr decoupled-min-lr lr-decay-style clip-grad weight-decay adam-beta1 adam-beta2 bf16 grad-reduce-in-bf16
        cross-entropy-loss-fusion calculate-per-token-loss manual-gc empty-unused-memory-level tensor-model-parallel-size
        context-parallel-size sequence-parallel use-distributed-optimizer overlap-grad-reduce overlap-param-gather mock-data
        tokenizer-type tokenizer-model vocab-size data-path data-cache-path split no-create-attention-mask-in-dataloader
        no-mmap-bin-files num-workers log-interval eval-iters eval-interval save-interval log-throughput profile
        profile-step-start profile-step-end ckpt-format distributed-timeout-minutes save load tensorboard-dir
        fp8-format fp8-amax-history-len fp8-amax-compute-algo fp8-param-gather
        """,
    "bert 340M": """
        num-layers hidden-size num-attention-heads seq-length max-position-embeddings attention-backend micro-batch-size
        global-batch-size train-iters weight-decay clip-grad fp16 lr lr-decay-iters lr-decay-style min-lr lr-warmup-fraction
        tensor-model-parallel-size pipeline-model-parallel-size data-path vocab-file split log-interval save-interval
        eval-interval save load eval-iters tensorboard-dir
        """,
    "t5 220M": """
        encoder-num-layers decoder-num-layers hidden-size num-attention-heads kv-channels ffn-hidden-size encoder-seq-length
        decoder-seq-length max-position-embeddings micro-batch-size global-batch-size lr train-iters lr-decay-iters
        lr-decay-style min-lr weight-decay lr-warmup-fraction clip-grad bf16 vocab-extra-ids init-method-std
        transformer-impl tensor-model-parallel-size pipeline-model-parallel-size attention-backend data-path vocab-file
        tokenizer-type split log-interval tensorboard-dir save-interval eval-interval eval-iters distributed-backend save load
        """,
    "race": """
        task seed train-data valid-data tokenizer-type vocab-file epochs pretrained-checkpoint tensor-model-parallel-size
        num-layers hidden-size num-attention-heads micro-batch-size lr lr-decay-style lr-warmup-fraction seq-length
        max-position-embeddings save-interval save log-interval eval-interval eval-iters weight-decay clip-grad hidden-dropout
        attention-dropout fp16
        """,
    "mnli": """
        task seed train-data valid-data tokenizer-type vocab-file epochs pretrained-checkpoint tensor-model-parallel-size
        num-layers hidden-size num-attention-heads micro-batch-size lr lr-decay-style lr-warmup-fraction seq-length
        max-position-embeddings save-interval save log-interval eval-interval eval-iters weight-decay fp16
        """,
    "tasks/main.py": "task epochs pretrained-checkpoint keep-last train-data valid-data overlapping-eval strict-lambada load",
    "mixtral 8x7B": """
        use-mcore-models disable-bias-linear seq-length max-position-embeddings num-layers hidden-size ffn-hidden-size
        num-attention-heads init-method-std attention-dropout hidden-dropout normalization position-embedding-type swiglu
        untie-embeddings-and-output-weights group-query-attention num-query-groups no-masked-softmax-fusion
        no-position-embedding rotary-base num-experts moe-router-topk moe-router-load-balancing-type moe-aux-loss-coeff
        moe-grouped-gemm moe-token-dispatcher-type overlap-param-gather overlap-grad-reduce tokenizer-type tokenizer-model
        data-path split micro-batch-size global-batch-size lr train-iters lr-decay-iters lr-decay-style min-lr weight-decay
        lr-warmup-iters clip-grad bf16 tensor-model-parallel-size pipeline-model-parallel-size expert-model-parallel-size
        use-distributed-optimizer sequence-parallel log-interval save-interval eval-interval eval-iters save load
        tensorboard-dir no-load-optim no-load-rng
        """,
    "deepseek v3": """
        distributed-timeout-minutes tensor-model-parallel-size pipeline-model-parallel-size expert-model-parallel-size
        context-parallel-size expert-tensor-parallel-size use-distributed-optimizer use-mcore-models sequence-parallel
        use-flash-attn disable-bias-linear micro-batch-size global-batch-size train-samples exit-duration-in-mins
        no-check-for-nan-in-loss-and-grad no-rope-fusion manual-gc manual-gc-interval transformer-impl seq-length data-cache-path
        tokenizer-type tokenizer-model data-path split no-mmap-bin-files no-create-attention-mask-in-dataloader num-workers
        num-layers hidden-size ffn-hidden-size num-attention-heads kv-channels max-position-embeddings
        position-embedding-type rotary-base make-vocab-size-divisible-by normalization norm-epsilon swiglu
        untie-embeddings-and-output-weights multi-latent-attention attention-dropout hidden-dropout clip-grad weight-decay
        qk-layernorm lr-decay-samples lr-warmup-samples lr-warmup-init lr min-lr lr-decay-style adam-beta1 adam-beta2 num-experts
        moe-layer-freq moe-ffn-hidden-size moe-shared-expert-intermediate-size moe-router-load-balancing-type moe-router-topk
        moe-token-dispatcher-type moe-enable-deepep moe-router-pre-softmax moe-grouped-gemm moe-aux-loss-coeff
        moe-router-group-topk moe-router-num-groups moe-router-topk-scaling-factor moe-router-score-function
        moe-router-enable-expert-bias moe-router-bias-update-rate moe-router-dtype moe-permute-fusion q-lora-rank kv-lora-rank
        qk-head-dim qk-pos-emb-head-dim v-head-dim rotary-scaling-factor mscale mscale-all-dim mtp-num-layers
        mtp-loss-scaling-factor eval-iters eval-interval auto-detect-ckpt-format load save save-interval dist-ckpt-strictness
        init-method-std log-timers-to-tensorboard log-memory-to-tensorboard log-num-zeros-in-grad log-params-norm
        log-validation-ppl-to-tensorboard log-throughput log-interval tensorboard-dir wandb-project wandb-exp-name bf16
        pipeline-model-parallel-layout recompute-granularity recompute-modules
        """,
    "qwen3 moe": """
        kv-channels qk-layernorm group-query-attention num-query-groups rotary-percent attention-backend overlap-grad-reduce
        overlap-param-gather moe-router-fusion moe-shared-expert-overlap cross-entropy-loss-fusion cross-entropy-fusion-impl
        tp-comm-overlap ckpt-format ckpt-fully-parallel-save ckpt-assume-constant-structure enable-experimental
        """,
}
"""Flags of the scripts in Megatron-LM's examples/gpt3, examples/llama, examples/bert, examples/t5 and examples/mixtral, of its scripts
that finetune on RACE and MNLI, and of tasks/main.py as far as its tasks are here; and of scripts for DeepSeek-V3 and Qwen3's mixtures."""


@pytest.mark.parametrize("script", EXAMPLES_OF_MEGATRON)
def test_every_flag_of_megatrons_example_scripts_is_known(script: str) -> None:
    known = set(flags()) | set(WITHOUT_EFFECT) | set(NOT_YET) | {"no_position_embedding"}
    assert {
        name.replace("-", "_") for name in EXAMPLES_OF_MEGATRON[script].split()
    } - known == set()


def test_no_table_of_positions_is_asked_for_where_positions_rotate_and_refused_where_there_would_be_none() -> (
    None
):
    _, ignored = parse(
        "pretrain", ["--no-position-embedding", "--position-embedding-type", "rope", "--lr", "1"]
    )
    assert ignored == ["--no-position-embedding"]
    with pytest.raises(UsageError, match="a model without any positions"):
        parse("pretrain", ["--no-position-embedding", "--lr", "1"])


def test_a_keep_last_without_a_number_is_that_of_megatrons_tasks() -> None:
    for words in ("--keep-last", "--keep-last --lr 1", "--lr 1 --keep-last"):
        found = settings(words)
        assert (found.tasks.keep_last_batch, found.checkpointing.keep_last) == (True, None)
    both = settings("--keep-last-batch --keep-last 3 --lr 1")
    assert (both.tasks.keep_last_batch, both.checkpointing.keep_last) == (True, 3)


def test_a_choice_may_be_said_in_any_case() -> None:
    assert [settings(f"--task {word}").tasks.task for word in ("mnli", "Race", "QQP")] == [
        "MNLI",
        "RACE",
        "QQP",
    ]
    with pytest.raises(UsageError, match="invalid choice: 'sst'"):
        settings("--task sst")


LATENT = f"{DEEPSEEK} --seq-length 16 --train-iters 1 --rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0"


def test_yarn_of_latent_attention_is_asked_for_as_in_megatrons_scripts() -> None:
    """A factor alone means yarn, the only scaling of latent attention, as in config.json."""
    yarn = {
        "rope_type": "yarn", "factor": 40.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096,
    }  # fmt: skip
    both = {"mscale": 1.0, "mscale_all_dim": 1.0}
    assert model_from_flags(settings(LATENT), 100).positions.scaling == {**yarn, **both}
    one = LATENT.replace(" --mscale 1.0 --mscale-all-dim 1.0", "")
    assert model_from_flags(settings(one), 100).positions.scaling == yarn
    for plain in (
        f"{LATENT} --rope-type rope --mscale-all-dim 0",
        LATENT.replace("factor 40", "factor 1"),
    ):
        assert model_from_flags(settings(plain), 100).positions.scaling is None
    with pytest.raises(UsageError, match="--rotary-scaling-factor is of latent attention's yarn"):
        model_from_flags(settings(LATENT.replace("--multi-latent-attention", "")), 100)
    with pytest.raises(UnknownFamily, match=r"has mscale 0\.7 and mscale_all_dim 0\.0"):
        model_from_flags(settings(f"{one} --mscale 0.7"), 100)


BERT = "--model-type bert --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 64 --train-iters 1"


def test_a_bert_is_described_by_megatrons_flags() -> None:
    config = model_from_flags(settings(BERT), 100)
    assert (config.family, config.token_types, config.head.binary, config.max_positions) == (
        "bert",
        2,
        True,
        64,
    )
    assert (config.mlp.activation, config.head.activation) == ("gelu_tanh", "gelu")
    config = model_from_flags(settings(f"{BERT} --bert-no-binary-head --no-bias-gelu-fusion"), 100)
    assert (config.token_types, config.head.binary, config.mlp.activation) == (0, False, "gelu")
    with pytest.raises(
        UsageError,
        match="--bert-no-binary-head False contradicts the checkpoint ckpt, which has True",
    ):
        check_against(settings("--bert-no-binary-head false"), config, {}, "ckpt")
    with pytest.raises(
        UsageError, match="--model-type gpt contradicts the checkpoint, which is a bert"
    ):
        model_type(settings("--model-type gpt"), config)


T5 = (
    "--model-type t5 --hidden-size 32 --num-attention-heads 4 --encoder-seq-length 64 --decoder-seq-length 32 --train-iters 1 "
    "--max-position-embeddings 64"
)


def t5_sizes(text: str, world: int) -> Sizes:
    found = settings(f"{T5} {text}")
    return work_out(found, model_from_flags(found, 100), ModelOptions(), world)


def test_a_t5_is_described_by_megatrons_flags() -> None:
    config = model_from_flags(settings(f"{T5} --encoder-num-layers 2 --decoder-num-layers 2"), 100)
    assert (config.family, config.encoder.layers, config.layer_count, config.max_positions) == (
        "t5",
        2,
        2,
        64,
    )
    assert (config.head.bias, config.tie_embeddings, config.norm.final) == (True, True, True)
    local = model_from_flags(settings(f"{T5} --num-layers 2 --transformer-impl local"), 100)
    assert not local.norm.final
    found = t5_sizes("--num-layers 2", 1)
    assert (found.seq, found.decoder_seq, found.layout.split_rank) == (64, 32, 0)
    check_against(settings("--encoder-num-layers 2"), config, {}, "ckpt")
    with pytest.raises(
        UsageError, match="--encoder-num-layers 3 contradicts the checkpoint ckpt, which has 2"
    ):
        check_against(settings("--encoder-num-layers 3"), config, {}, "ckpt")


@pytest.mark.parametrize(
    "words",
    [
        "--pp 4 --pipeline-model-parallel-split-rank 2",
        "--pp 2 --encoder-pipeline-model-parallel-size 2",
    ],
)
def test_either_of_megatrons_ways_shares_out_the_stages_of_a_t5(words: str) -> None:
    layout = t5_sizes(f"--num-layers 2 {words}", 4).layout
    assert (layout.pp, layout.encoder_stage_layers, layout.stage_layers) == (
        4,
        (1, 1),
        (0, 0, 1, 1),
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--num-layers 2 --pp 2", "pp = 2: no stage has layers of both stacks of a T5; --pipeline-model-parallel-split-rank N"),
        ("--num-layers 2 --pp 2 --num-virtual-stages-per-pipeline-rank 2", "--num-virtual-stages-per-pipeline-rank is not supported"),
        ("--num-layers 3 --pp 4 --pipeline-model-parallel-split-rank 2", "layers of the encoder = 3 can't be divided"),
        ("--num-layers 2 --decoder-num-layers 3", "gives a T5's decoder as many layers as its encoder; give one number"),
        ("--num-layers 2 --seq-length 63", "--seq-length 63 and --encoder-seq-length 64 are the same length"),
        ("--num-layers 2 --decoder-seq-length 65", "a sequence of 65 tokens is longer than the model's 64 positions"),
    ],
)  # fmt: skip
def test_a_t5_that_can_not_be_shared_out_is_refused(words: str, message: str) -> None:
    with pytest.raises((UsageError, LayoutError), match=re.escape(message)):
        t5_sizes(words, 4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--model-type t5 --cp 2",
            "--context-parallel-size has no part in a t5: there is code for 1 alone",
        ),
        (
            "--model-type t5 --num-experts 4",
            "--num-experts has no part in a t5: its layers have plain attention",
        ),
        (
            "--model-type t5 --fp8-format hybrid",
            "--fp8-format has no part in a t5: there is no code for it",
        ),
        (
            "--model-type t5 --compile",
            "--compile has no part in a t5: there is no code for it; leave it out",
        ),
        (
            "--model-type t5 --lora-rank 4",
            "--lora-rank has no part in a t5: adapters are for decoders so far",
        ),
        (
            "--model-type t5 --finetune-data x",
            "--finetune-data has no part in a t5: examples are for models",
        ),
        (
            "--vocab-extra-ids 5",
            "--vocab-extra-ids has no part in a gpt: it is about another --model-type",
        ),
        ("--model-type bert --decoder-seq-length 5", "--decoder-seq-length has no part in a bert"),
        (
            "--model-type bert --cp 2",
            "--context-parallel-size has no part in a bert: there is code for 1 alone",
        ),
        (
            "--model-type bert --num-experts 4",
            "--num-experts has no part in a bert: its layers have plain attention",
        ),
        (
            "--model-type bert --reset-attention-mask",
            "--reset-attention-mask has no part in a bert: its samples are",
        ),
        (
            "--model-type bert --lora-rank 4",
            "--lora-rank has no part in a bert: adapters are for decoders so far",
        ),
        (
            "--model-type bert --position-embedding-type rope",
            "there is code for learned_absolute alone",
        ),
        ("--model-type bert --mock-data", "there are no random sentences; give --data-path"),
        ("--mask-prob 0.2", "--mask-prob has no part in a gpt: it is about another --model-type"),
        ("--bert-no-binary-head", "--bert-no-binary-head has no part in a gpt"),
        ("--task MNLI", "--task has no part in a gpt: it is about another --model-type"),
    ],
)
def test_flags_that_a_kind_of_model_has_no_use_for_are_refused_by_name(
    words: str, message: str
) -> None:
    asked = settings(words)
    with pytest.raises(UsageError, match=re.escape(message)):
        check_kind(asked, model_type(asked, None))


def test_parallel_sizes_have_short_flags() -> None:
    found = settings("--tp 4 --pp 2")
    assert (
        found.parallel.tensor_model_parallel_size,
        found.parallel.pipeline_model_parallel_size,
    ) == (4, 2)
    assert found.given == {"tensor_model_parallel_size", "pipeline_model_parallel_size"}


def test_the_null_tokenizers_vocabulary_is_one_more_as_megatrons_is() -> None:
    config = model_from_flags(settings(LLAMA), 101)
    check_against(settings("--tokenizer-type NullTokenizer --vocab-size 100"), config, {}, "ckpt")
    with pytest.raises(UsageError, match="contradicts the checkpoint"):
        check_against(settings("--vocab-size 100"), config, {}, "ckpt")


def test_a_sequence_as_long_as_the_models_positions_is_capped_unless_asked_for() -> None:
    long = settings(LLAMA.replace("--seq-length 32", "--max-position-embeddings 131072"))
    config = model_from_flags(long, 100)
    assert work_out(long, config, ModelOptions(), 1).seq == 4096
    asked = settings(
        LLAMA.replace("--seq-length 32", "--max-position-embeddings 131072 --seq-length 8192")
    )
    assert work_out(asked, config, ModelOptions(), 1).seq == 8192


def test_yaml_says_the_same_as_flags_and_the_command_line_wins(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "optimizer:\n  lr: 1e-4\n  min-lr: 1e-5\nmicro_batch_size: 4\nswiglu: true\nbf16: true\n"
        "data_path: [0.3, a, 0.7, b]\nrampup_batch_size: 2 2 8\nuse-mcore-models: true\nseed: null\n"
    )
    for flag in ("--yaml-cfg", "--config-file"):
        found, ignored = parse(
            "pretrain", f"{flag} {path} --micro-batch-size 2 --bf16 false".split()
        )
        assert (found.optimizer.lr, found.optimizer.min_lr, found.training.micro_batch_size) == (
            1e-4,
            1e-5,
            2,
        )
        assert (found.model.swiglu, found.precision.bf16) == (True, False)
        assert (found.data.data_path, found.training.rampup_batch_size) == (
            ("0.3", "a", "0.7", "b"),
            (2, 2, 8),
        )
        assert found.training.seed == 1234
        assert ignored == [f"{path}: use-mcore-models"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr: fast", "lr: expected float, found 'fast'"),
        ("learning_rate: 1", "unknown flag --learning-rate"),
        ("micro_batch_sise: 1", "did you mean --micro-batch-size"),
        ("ckpt_format: zarr", "ckpt_format: choose one of torch_dist, torch"),
        ("- a\n- b", "should be a mapping"),
        ("a: [", "is not YAML"),
        ("dataloader_type: cyclic", "--dataloader-type cyclic is not available"),
    ],
)
def test_a_yaml_file_that_is_wrong_is_refused_by_name(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=re.escape(message)) as error:
        settings(f"--yaml-cfg {path}")
    assert str(path) in str(error.value)
    with pytest.raises(UsageError, match="can't be read"):
        settings(f"--yaml-cfg {path}.not")


def test_a_yaml_file_that_is_not_utf_8_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(b"lr: 1  # \xe9\n")
    with pytest.raises(UsageError, match=r"run.yaml: can't be read: 'utf-8'"):
        settings(f"--yaml-cfg {path}")


def test_flags_describe_llama_and_gpt2() -> None:
    llama = model_from_flags(settings(LLAMA), 100)
    assert (
        llama.family,
        llama.attention.kv_heads,
        llama.mlp.ffn,
        llama.tie_embeddings,
        llama.attention.qkv_bias,
    ) == ("llama", 2, 128, False, False)
    gpt2 = model_from_flags(
        settings(
            "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 64"
        ),
        50,
    )
    assert (gpt2.family, gpt2.mlp.ffn, gpt2.positions.kind, gpt2.tie_embeddings) == (
        "gpt2",
        128,
        "learned",
        True,
    )
    assert (gpt2.mlp.activation, gpt2.norm.kind, gpt2.mlp.bias) == ("gelu_tanh", "LayerNorm", True)
    scaled = model_from_flags(
        settings(LLAMA + " --use-rope-scaling --rope-scaling-factor 32 --rotary-base 500000"), 100
    )
    assert scaled.positions.theta == 5e5
    assert (scaled.positions.scaling or {})["factor"] == 32
    qwen = model_from_flags(settings(LLAMA + " --qk-layernorm --kv-channels 32"), 100)
    assert (qwen.family, qwen.attention.head_dim) == ("qwen3", 32)


def test_layers_without_experts_need_a_family_that_has_them() -> None:
    mixed = f"{LLAMA} --num-experts 4 --moe-ffn-hidden-size 32 --moe-layer-freq 2"
    with pytest.raises(NotExpressible, match="a mixtral with layers without experts"):
        model_from_flags(settings(mixed), 100)
    assert model_from_flags(settings(f"{mixed} --qk-layernorm"), 100).family == "qwen3_moe"
    all_have_experts = mixed.replace("freq 2", "freq 1")
    assert model_from_flags(settings(all_have_experts), 100).family == "mixtral"


def test_a_flag_that_contradicts_the_checkpoint_is_an_error_and_one_that_agrees_is_not() -> None:
    config = model_from_flags(settings(LLAMA), 100)
    dropouts = {"attention_dropout": 0.0, "hidden_dropout": 0.1}
    agreeing = "--vocab-size 100 --hidden-dropout 0.1 --init-method-std 0.5 --make-vocab-size-divisible-by 4 --add-qkv-bias false"
    check_against(settings(f"{LLAMA} {agreeing}"), config, dropouts, "ckpt")
    for words in (
        "--num-layers 5", "--hidden-size 32", "--num-query-groups 4", "--rotary-base 5e5", "--norm-epsilon 1e-6", "--add-qkv-bias",
        "--vocab-size 99", "--attention-dropout 0.1", "--untie-embeddings-and-output-weights false", "--qk-layernorm",
        "--ffn-hidden-size 256", "--position-embedding-type learned_absolute", "--disable-bias-linear false", "--kv-channels 8",
    ):  # fmt: skip
        with pytest.raises(UsageError, match="contradicts the checkpoint ckpt, which has") as error:
            check_against(settings(words), config, dropouts, "ckpt")
        assert words.split()[0] in str(error.value)


def test_sizes_that_fit_are_worked_out() -> None:
    found = sizes(
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --global-batch-size 12 --micro-batch-size 2",
        12,
    )
    assert (found.dp, found.batch.full, str(found.layout)) == (3, 12, "TP 2, PP 2")
    assert sizes("", 3).batch.full == 3
    virtual = sizes(
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 4",
        2,
    )
    assert (virtual.layout.vpp, virtual.layout.stage_layers) == (2, (1, 1, 1, 1))
    uneven = sizes("--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1", 2)
    assert uneven.layout.stage_layers == (1, 3)


@pytest.mark.parametrize(
    ("words", "world", "etp"),
    [
        ("--tp 2 --ep 2", 4, 2),
        ("--tp 2 --ep 2", 2, 1),
        ("--tp 2 --ep 2 --etp 1", 4, 1),
        ("--etp 2", 2, 2),
        ("--tp 2 --moe-ffn-hidden-size 25", 2, 1),
    ],
)
def test_each_expert_is_shared_as_in_megatron_where_that_fits(
    words: str, world: int, etp: int
) -> None:
    assert (
        sizes(
            f"--num-experts 4 --sequence-parallel --swiglu --disable-bias-linear {words}", world
        ).layout.etp
        == etp
    )


IMPOSSIBLE = [
    ("--expert-model-parallel-size 2", 2, "the model has no experts"),
    ("--expert-tensor-parallel-size 2", 2, "(etp) is 2, but the model has no experts"),
    ("--num-experts 4 --ep 2 --etp 2", 2, "etp x ep = 2 x 2 = 4 has to divide"),
    ("--num-experts 4 --etp 0", 2, "etp = 0: parallel sizes must be 1 or more"),
    ("--moe-router-load-balancing-type sinkhorn", 1, "--moe-router-load-balancing-type sinkhorn is not supported yet"),
    ("--moe-aux-loss-coeff 0.1 0.2", 1, "need as many words as numbers"),
    ("--moe-expert-capacity-factor 0", 1, "--moe-expert-capacity-factor 0 must be more than 0"),
    ("--moe-pad-expert-input-to-capacity", 1, "requires --moe-expert-capacity-factor"),
    ("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", 6, "2 x 2 = 4"),
    ("--tensor-model-parallel-size 4", 4, "kv_heads = 2"),
    ("--pipeline-model-parallel-size 3", 3, "layers = 4"),
    ("--global-batch-size 6 --micro-batch-size 4", 1, "a multiple of 4 x 1 = 4"),
    ("--global-batch-size 6 --micro-batch-size 1", 4, "a multiple of 1 x 4 = 4"),
    ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 3", 2, "use 2 or 4"),
    ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3", 2, "2 x 3 = 6 has to divide"),
    ("--num-virtual-stages-per-pipeline-rank 2 --num-layers-per-virtual-pipeline-stage 1", 1, "not both"),
    ("--num-virtual-stages-per-pipeline-rank 2", 1, "pipeline parallel size of 2 or more"),
    ("--tensor-model-parallel-size 2 --sequence-parallel --seq-length 31", 2, "31"),
    ("--tensor-model-parallel-size 0", 1, "must be 1 or more"),
    ("--cp 2 --seq-length 30", 2, "cuts 30 tokens into 2 x cp = 2 x 2 blocks"),
    ("--cp 4 --tp 2", 4, "tp x cp x pp = 2 x 4 x 1 = 8"),
    ("--cp-comm-type ring", 1, "--cp-comm-type ring is not supported; choose one of p2p, all_gather, a2a, a2a+p2p for all layers"),
    ("--cp-comm-type p2p a2a", 1, "--cp-comm-type p2p a2a is not supported"),
    ("--micro-batch-size 0", 1, "--micro-batch-size 0 must be 1 or more"),
    ("--global-batch-size 0", 1, "--global-batch-size 0 must be 1 or more"),
    ("--lora-rank 4 --lora-alpha nan", 1, "--lora-alpha nan must be a finite number"),
    ("--bf16 --fp16", 1, "contradict each other"),
    ("--fp8-format hybrid", 1, "--fp8-format requires --bf16"),
    ("--fp8-format e4m3 --bf16 --compile", 1, "--fp8-format can't be combined with --compile"),
    ("--fp8-format e4m3 --bf16 --lora-rank 4", 1, "--fp8-format can't be combined with adapters"),
    ("--fp8-format hybrid --bf16 --fp8-recipe mxfp8", 1, "take --fp8-format e4m3"),
    ("--train-samples 10", 1, "not several of them"),
    ("--lr-warmup-samples 10", 1, "--lr-warmup-samples has no effect beside a run without --train-samples; give --lr-warmup-iters"),
    ("--lr-decay-samples 10", 1, "give --lr-decay-iters"),
    ("--lr-wsd-decay-samples 10", 1, "give --lr-wsd-decay-iters"),
    ("--lr-warmup-iters 2 --lr-warmup-fraction 0.1", 1, "--lr-warmup-fraction and --lr-warmup-iters are two lengths of the warm-up"),
    ("--save-interval 3", 1, "needs --save"),
    ("--resume", 1, "--save, which is missing"),
    ("--save-delta 3", 1, "--save-delta needs --save"),
    ("--save-delta 0 --save ckpt", 1, "--save-delta 0 must be 1 or more"),
    ("--save-delta 3 --save ckpt --keep-last 2", 1, "--save-delta keeps all checkpoints, and --keep-last removes them"),
    ("--save-delta 3 --save s3://bucket/run", 1, "--save-delta needs a directory"),
    ("--save-delta 3 --save ckpt --lora-rank 4", 1, "--save-delta: adapters are small and have no patches"),
    ("--recompute-granularity full", 1, "needs --recompute-method"),
    ("--recompute-method block", 1, "requires --recompute-granularity full"),
    ("--eval-iters -1", 1, "must be 0 or more"),
    ("--log-interval 0", 1, "must be 1 or more"),
    ("--rampup-batch-size 2 2 10 --global-batch-size 8", 1, "give --train-samples"),
    ("--rampup-batch-size 3 2 10 --global-batch-size 8", 1, "8 (the global batch) - 3 = 5"),
    ("--decoder-first-pipeline-num-layers 5 --pipeline-model-parallel-size 2", 2, "leave -1 of 4 layers"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "world", "message"), IMPOSSIBLE)
def test_an_impossible_size_is_refused_with_its_arithmetic(
    words: str, world: int, message: str
) -> None:
    with pytest.raises((UsageError, LayoutError), match=re.escape(message)):
        sizes(words, world)


@pytest.mark.parametrize(
    "missing", ["--num-layers 4", "--hidden-size 64", "--num-attention-heads 4"]
)
def test_a_model_without_its_sizes_is_refused(missing: str) -> None:
    with pytest.raises(UsageError, match=f"{missing.split()[0]} is missing"):
        model_from_flags(settings(LLAMA.replace(missing, "")), 100)
    with pytest.raises(CheckpointError):
        model_from_flags(settings(LLAMA.replace("--hidden-size 64", "--hidden-size 66")), 100)


def test_a_longer_sequence_than_learned_positions_is_refused() -> None:
    found = settings(
        "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 16 --seq-length 32 --train-iters 1"
    )
    config: ModelConfig = replace(model_from_flags(found, 50))
    with pytest.raises(CheckpointError, match="32"):
        work_out(found, config, ModelOptions(), 1)


@pytest.mark.parametrize(
    ("flags_given", "said"),
    [
        ("--qk-clip --qk-layernorm", "norms of q and k come after them"),
        ("--qk-clip-threshold 50", "--qk-clip-threshold requires --qk-clip"),
        ("--qk-clip --qk-clip-alpha 2", "--qk-clip-alpha 2 has to lie between 0 and 1"),
        ("--qk-clip --lora-rank 4 --load x", "--qk-clip changes weights"),
    ],
)
def test_a_clip_that_could_do_nothing_is_refused(flags_given: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        sizes(flags_given, 1)


@pytest.mark.parametrize(
    ("flags_given", "said"),
    [
        ("--cp 4 --cp-comm-type a2a+p2p", "NEAR FAR, of 2 or more, which make --cp = 4"),
        (
            "--cp 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 4 1",
            "which make --cp = 4",
        ),
        ("--cp 2 --hierarchical-context-parallel-sizes 2 1", "requires --cp-comm-type a2a.p2p"),
    ],
)
def test_two_levels_of_context_parallelism_have_to_make_its_size(
    flags_given: str, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        sizes(flags_given, 4)


def test_a_strategy_shards_what_the_one_before_it_shards_and_more() -> None:
    found = []
    for strategy in ("no_shard", "optim", "optim_grads", "optim_grads_params"):
        options = optimizer_options(settings(f"--data-parallel-sharding-strategy {strategy}"))
        assert options.sharding == strategy
        found.append((options.distributed, options.shards_gradients, options.shards_parameters))
    assert [sum(each) for each in found] == [0, 1, 2, 3]
    assert optimizer_options(settings("--use-distributed-optimizer")).sharding == "optim"


@pytest.mark.parametrize(
    ("flags_given", "message"),
    [
        ("optim_grads --pp 2", "requires --pp 1"),
        ("no_shard --use-distributed-optimizer", "contradicts the distributed optimizer"),
    ],
)
def test_a_strategy_that_contradicts_other_flags_is_refused(flags_given: str, message: str) -> None:
    given = settings(f"--data-parallel-sharding-strategy {flags_given}")
    with pytest.raises(UsageError, match=message):
        check_flags(given)


@pytest.mark.parametrize("name", ["attention", "hidden", "lora", "retro-encoder-hidden"])
@pytest.mark.parametrize("value", ["1.5", "-0.1", "nan"])
def test_a_dropout_that_is_no_share_is_refused_by_its_flag(name: str, value: str) -> None:
    given = settings(f"--{name}-dropout {value}")
    with pytest.raises(UsageError, match=f"--{name}-dropout {value} has to lie between 0 and 1"):
        check_flags(given)


def test_output_that_can_not_be_written_is_an_error_of_one_line(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as ended:
            cli.main(["recipes"])
    assert ended.value.code == 1
    assert capfd.readouterr().err == "megatron-lite: error: [Errno 28] No space left on device\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", ["--help", "finetune --help", "recipes --help"])
def test_help_that_nobody_reads_ends_without_a_traceback(words: str, unbuffered: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run(
        [sys.executable, "-m", "megatron_lite", *words.split()],
        stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )  # fmt: skip
    os.close(writing)
    assert ended.stderr == ""


@pytest.mark.parametrize("closed", ["2>&-", ">&-", "<&-", "<&- >&- 2>&-"])
def test_a_command_needs_no_standard_streams(closed: str) -> None:
    code = "import sys; from megatron_lite.cli import main\ntry: main(['recipes'])\nfinally: assert sys.stdin and sys.stdout and sys.stderr"
    ended = subprocess.run(["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, code])
    assert ended.returncode == 0

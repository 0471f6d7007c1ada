"""`--help` of the commands that train: the usual flags on one screen. `--help-all` lists all of them."""

_SHORT_FORM = """\
usage: megatron-lite finetune MODEL DATA --save DIRECTORY [FLAGS]
       torchrun --nproc-per-node N -m megatron_lite finetune MODEL DATA --save DIRECTORY [FLAGS]

Train on from the weights of any checkpoint that megaconv reads.

  MODEL   a directory, a file or a Hub id         (or --load MODEL, then all settings are yours)
  DATA    JSON lines with messages, prompt and completion, or text; a text file; a directory of these;
          or the prefix of an indexed corpus      (or --finetune-data DATA, --data-path PREFIX)

With MODEL and DATA, every other setting has a default, and the log names it. The command stops if the training does not
fit into memory, and prints commands that fit. At its end it shows how to chat with the result, publish and convert it.
"""

_PRETRAIN = """\
usage: megatron-lite pretrain [FLAGS]
       torchrun --nproc-per-node N -m megatron_lite pretrain [FLAGS]

Train a model from the start, or continue a run at any parallel layout. Flags are Megatron-LM's.

model:
  --num-layers N --hidden-size N --num-attention-heads N --ffn-hidden-size N --num-query-groups N
  --position-embedding-type rope --normalization RMSNorm --swiglu --num-experts N --moe-router-topk N
  --load PATH                   the run to continue, or a checkpoint of any format
data:
  --data-path PREFIX            indexed corpora, as `megatron-lite preprocess` writes them
  --tokenizer-type TYPE --tokenizer-model PATH          or --vocab-size N with --mock-data
"""

_LENGTH = {
    "finetune": "  --epochs N                    times that the data is read (3)\n",
    "pretrain": "  --train-iters N               steps of the run\n",
}

_USUAL = """\
training:
{length}  --lr X                        highest learning rate
  --seq-length N                tokens of a sequence
  --micro-batch-size N          sequences of one forward pass
  --global-batch-size N         sequences of one step
  --bf16, --fp16, --fp32        precision (default: the checkpoint's)
{adapters}memory and speed:
  --tensor-model-parallel-size N, --pipeline-model-parallel-size N
  --context-parallel-size N, --expert-model-parallel-size N
  --data-parallel-sharding-strategy optim|optim_grads|optim_grads_params
  --recompute-granularity selective|full
output:
  --save DIRECTORY              checkpoints; with --resume the same command continues after a stop
  --save-interval N             steps between checkpoints (default: at the end only)
  --valid-finetune-data FILE    examples for evaluations; --eval-interval N sets the steps between them
  --keep-best, --keep-last N    keep the checkpoint with the lowest validation loss, and the last ones
  --metrics-file PATH, --tensorboard-dir PATH, --wandb-project NAME
settings in files:
  --recipe NAME                 settings for a common model; `megatron-lite recipes` lists them
  --yaml-cfg PATH               your own settings; flags of the command line win
"""

_ADAPTERS = """\
  --lora-rank N                 train LoRA adapters; the model's weights stay as they are
  --dpo                         learn from pairs of a chosen and a rejected answer
  --kto                         learn from answers that are rated good or bad
  --reward-modeling             train a reward model on pairs of a chosen and a rejected answer
  --grpo --reward FILE.py:F     learn from rewards of the model's own completions of prompts
  --teacher-load MODEL          learn the predictions of another model
"""

_EXAMPLES = {
    "finetune": """\
examples:
  megatron-lite finetune Llama-3.2-1B-Instruct chats.jsonl --save tuned
  megatron-lite finetune meta-llama/Llama-3.1-8B-Instruct chats.jsonl --recipe llama3-8b-lora --save tuned
""",
    "pretrain": """\
examples:
  megatron-lite pretrain --num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 512 \\
      --mock-data --vocab-size 1024 --micro-batch-size 4 --train-iters 100 --lr 3e-4 --save ckpt --resume
""",
}


def short_help(command: str) -> str:
    """Return the help of `finetune` or `pretrain` that fits on one screen."""
    finetunes = command == "finetune"
    usual = _USUAL.format(length=_LENGTH[command], adapters=_ADAPTERS if finetunes else "")
    head = _SHORT_FORM if finetunes else _PRETRAIN
    return f"{head}\n{usual}\n{_EXAMPLES[command]}\n--help-all lists all flags.\n"

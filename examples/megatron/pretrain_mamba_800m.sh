#!/usr/bin/env bash
# A hybrid of Mamba 2, attention and MLPs with 800 million parameters, on one machine with 8 GPUs: DP 8.
#
#   DATA_PATH=my_text_document TOKENIZER_MODEL=tokenizer.model CHECKPOINTS=checkpoints \
#       examples/megatron/pretrain_mamba_800m.sh [FLAGS]
#   examples/megatron/pretrain_mamba_800m.sh --dry-run    (prints memory, traffic and bubble; needs no data, no tokenizer, no GPU)
#
# The shares of attention and MLPs give the pattern of layers. Further flags override those below. The same command continues an
# interrupted run.
set -euo pipefail

python=${PYTHON:-python3}
flags=(
    --num-layers 48 --hidden-size 1024 --num-attention-heads 16 --group-query-attention --num-query-groups 8
    --hybrid-attention-ratio 0.08 --hybrid-mlp-ratio 0.5 --spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec
    --seq-length 4096 --max-position-embeddings 4096 --position-embedding-type none
    --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights --init-method-std 0.02
    --attention-dropout 0.0 --hidden-dropout 0.0
    --tensor-model-parallel-size 1 --sequence-parallel --pipeline-model-parallel-size 1
    --use-distributed-optimizer --overlap-param-gather --overlap-grad-reduce
    --micro-batch-size 4 --global-batch-size 32
    --train-samples 73242188 --lr-warmup-samples 50000 --lr-decay-samples 73192188
    --lr 2.5e-4 --min-lr 2.5e-5 --lr-decay-style cosine
    --weight-decay 0.1 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95 --bf16
    --log-interval 10 --eval-interval 2000 --eval-iters 32
    --use-mcore-models --no-create-attention-mask-in-dataloader
)

if [[ ${1:-} == --dry-run ]]; then
    shift
    exec "$python" -m megatron_lite plan --world-size 8 --vocab-size 256000 "${flags[@]}" "$@"
fi

exec "$python" -m torch.distributed.run --nproc-per-node 8 -m megatron_lite pretrain "${flags[@]}" \
    --data-path "${DATA_PATH:?is the prefix of a dataset that preprocess has written}" --split 99,1,0 \
    --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model "${TOKENIZER_MODEL:?is a model of SentencePiece}" \
    --save "${CHECKPOINTS:?is the directory for checkpoints}" --save-interval 2000 --resume "$@"

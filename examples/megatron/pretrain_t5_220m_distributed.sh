#!/usr/bin/env bash
# T5 with 221 million parameters (known as 220M) on 8 GPUs: data parallelism.
#
#   DATA_PATH=my-t5_text_sentence VOCAB_FILE=bert-vocab.txt CHECKPOINTS=checkpoints \
#       examples/megatron/pretrain_t5_220m_distributed.sh [FLAGS]
#   examples/megatron/pretrain_t5_220m_distributed.sh --dry-run    (prints memory, traffic and bubble; needs no data, no tokenizer, no GPU)
#
# Further flags override those below. The same command continues an interrupted run.
set -euo pipefail

python=${PYTHON:-python3}
flags=(
    --model-type t5 --num-layers 12 --hidden-size 768 --num-attention-heads 12 --kv-channels 64 --ffn-hidden-size 3072
    --encoder-seq-length 512 --decoder-seq-length 128 --max-position-embeddings 512
    --train-iters 1000000 --lr 0.0001 --min-lr 1e-5 --lr-decay-style linear --lr-decay-iters 990000 --lr-warmup-fraction 0.01
    --weight-decay 1e-2 --clip-grad 1.0 --fp16
    --log-interval 100 --eval-interval 1000 --eval-iters 10
    --micro-batch-size 16 --global-batch-size 128
)

if [[ ${1:-} == --dry-run ]]; then
    shift
    exec "$python" -m megatron_lite plan --world-size 8 --vocab-size 29098 "${flags[@]}" "$@"
fi

exec "$python" -m torch.distributed.run --nproc-per-node 8 --nnodes 1 --node-rank "${NODE_RANK:-0}" \
    --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-6000}" -m megatron_lite pretrain "${flags[@]}" \
    --data-path "${DATA_PATH:?is the prefix of a dataset that preprocess --split-sentences has written}" --split 949,50,1 \
    --tokenizer-type BertWordPieceCase --vocab-file "${VOCAB_FILE:?is vocab.txt of BERT}" --vocab-extra-ids 100 \
    --save "${CHECKPOINTS:?is the directory for checkpoints}" --save-interval 10000 --resume "$@"

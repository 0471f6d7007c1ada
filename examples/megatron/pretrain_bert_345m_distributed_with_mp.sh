#!/usr/bin/env bash
# BERT with 336 million parameters (known as 345M) on 8 GPUs: TP 2 x PP 2 x DP 2, with sequence parallelism.
#
#   DATA_PATH=my-bert_text_sentence VOCAB_FILE=bert-vocab.txt CHECKPOINTS=checkpoints \
#       examples/megatron/pretrain_bert_345m_distributed_with_mp.sh [FLAGS]
#   examples/megatron/pretrain_bert_345m_distributed_with_mp.sh --dry-run    (prints memory, traffic and bubble; needs no data, no tokenizer, no GPU)
#
# Further flags override those below. The same command continues an interrupted run.
set -euo pipefail

python=${PYTHON:-python3}
flags=(
    --model-type bert --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 --max-position-embeddings 512
    --train-iters 1000000 --lr 0.0001 --lr-decay-style linear --lr-decay-iters 990000 --lr-warmup-fraction 0.01
    --weight-decay 1e-2 --clip-grad 1.0 --fp16
    --log-interval 100 --eval-interval 1000 --eval-iters 10
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel
    --micro-batch-size 2 --global-batch-size 16
)

if [[ ${1:-} == --dry-run ]]; then
    shift
    exec "$python" -m megatron_lite plan --world-size 8 --vocab-size 30522 "${flags[@]}" "$@"
fi

exec "$python" -m torch.distributed.run --nproc-per-node 8 --nnodes 1 --node-rank "${NODE_RANK:-0}" \
    --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-6000}" -m megatron_lite pretrain "${flags[@]}" \
    --data-path "${DATA_PATH:?is the prefix of a dataset that preprocess --split-sentences has written}" --split 949,50,1 \
    --tokenizer-type BertWordPieceLowerCase --vocab-file "${VOCAB_FILE:?is vocab.txt of BERT}" \
    --save "${CHECKPOINTS:?is the directory for checkpoints}" --save-interval 10000 --resume "$@"

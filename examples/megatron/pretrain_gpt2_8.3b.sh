#!/usr/bin/env bash
# GPT-2 with 8.3 billion parameters on 64 machines with 8 GPUs each: TP 8 x DP 64.
#
#   DATA_PATH=my-gpt2_text_document VOCAB_FILE=gpt2-vocab.json MERGE_FILE=gpt2-merges.txt CHECKPOINTS=checkpoints \
#       examples/megatron/pretrain_gpt2_8.3b.sh [FLAGS]
#   examples/megatron/pretrain_gpt2_8.3b.sh --dry-run    (prints memory, traffic and bubble; needs no data, no tokenizer, no GPU)
#
# Start it on every machine, with NODE_RANK (0, 1 ...) and MASTER_ADDR (the first machine). --dry-run needs one machine alone.
# Further flags override those below. The same command continues an interrupted run.
set -euo pipefail

python=${PYTHON:-python3}
flags=(
    --num-layers 72 --hidden-size 3072 --num-attention-heads 32 --seq-length 1024 --max-position-embeddings 1024
    --tensor-model-parallel-size 8
    --micro-batch-size 8 --global-batch-size 512 --recompute-granularity full --recompute-method uniform
    --train-iters 300000 --lr 0.00015 --min-lr 1e-5 --lr-decay-style cosine --lr-warmup-iters 3000
    --weight-decay 1e-2 --clip-grad 1.0 --fp16
    --log-interval 100 --eval-interval 1000 --eval-iters 10
)

if [[ ${1:-} == --dry-run ]]; then
    shift
    exec "$python" -m megatron_lite plan --world-size 512 --vocab-size 50257 "${flags[@]}" "$@"
fi

exec "$python" -m torch.distributed.run --nproc-per-node 8 --nnodes 64 --node-rank "${NODE_RANK:-0}" \
    --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-6000}" -m megatron_lite pretrain "${flags[@]}" \
    --data-path "${DATA_PATH:?is the prefix of a dataset that preprocess has written}" --split 949,50,1 \
    --tokenizer-type GPT2BPETokenizer --vocab-file "${VOCAB_FILE:?is vocab.json of GPT-2}" --merge-file "${MERGE_FILE:?is merges.txt of GPT-2}" \
    --save "${CHECKPOINTS:?is the directory for checkpoints}" --save-interval 5000 --resume "$@"

#!/usr/bin/env bash
# GPT-3 with 175 billion parameters on 128 machines with 8 GPUs each: TP 8 x PP 16 x DP 8.
#
#   DATA_PATH=my-gpt2_text_document VOCAB_FILE=gpt2-vocab.json MERGE_FILE=gpt2-merges.txt CHECKPOINTS=checkpoints \
#       examples/megatron/pretrain_gpt3_175b.sh [FLAGS]
#   examples/megatron/pretrain_gpt3_175b.sh --dry-run    (prints memory, traffic and bubble; needs no data, no tokenizer, no GPU)
#
# Start it on every machine, with NODE_RANK (0, 1 ...) and MASTER_ADDR (the first machine). --dry-run needs one machine alone.
# Further flags override those below. The same command continues an interrupted run.
set -euo pipefail

python=${PYTHON:-python3}
flags=(
    --num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --sequence-parallel
    --micro-batch-size 1 --global-batch-size 1536 --rampup-batch-size 16 16 5859375
    --recompute-granularity full --recompute-method uniform
    --train-samples 146484375 --lr 6.0e-5 --min-lr 6.0e-6 --lr-decay-style cosine --lr-decay-samples 126953125
    --lr-warmup-samples 183105 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0 --fp16
    --log-interval 10 --eval-interval 1000 --eval-iters 10
)

if [[ ${1:-} == --dry-run ]]; then
    shift
    exec "$python" -m megatron_lite plan --world-size 1024 --vocab-size 50257 "${flags[@]}" "$@"
fi

exec "$python" -m torch.distributed.run --nproc-per-node 8 --nnodes 128 --node-rank "${NODE_RANK:-0}" \
    --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-6000}" -m megatron_lite pretrain "${flags[@]}" \
    --data-path "${DATA_PATH:?is the prefix of a dataset that preprocess has written}" --split 949,50,1 \
    --tokenizer-type GPT2BPETokenizer --vocab-file "${VOCAB_FILE:?is vocab.json of GPT-2}" --merge-file "${MERGE_FILE:?is merges.txt of GPT-2}" \
    --save "${CHECKPOINTS:?is the directory for checkpoints}" --save-interval 1000 --resume "$@"

#!/usr/bin/env bash
# Finetunes the BERT of 345M on RACE, on 8 GPUs.
#
#   TRAIN_DATA=RACE/train/middle VALID_DATA='RACE/dev/middle RACE/dev/high' \
#       PRETRAINED=checkpoints/bert_345m VOCAB_FILE=bert-vocab.txt CHECKPOINTS=checkpoints/bert_345m_race \
#       examples/megatron/finetune_race_distributed.sh [FLAGS]
#   examples/megatron/finetune_race_distributed.sh --dry-run    (prints the command; needs no data, no checkpoint, no GPU)
#
# Further flags override those below.
set -euo pipefail

run=("${PYTHON:-python3}")
if [[ ${1:-} == --dry-run ]]; then
    shift
    run=(echo "${run[@]}")
    TRAIN_DATA=RACE/train/middle
    VALID_DATA='RACE/dev/middle RACE/dev/high'
    PRETRAINED=checkpoints/bert_345m
    VOCAB_FILE=bert-vocab.txt
    CHECKPOINTS=checkpoints/bert_345m_race
fi

model=(--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 --max-position-embeddings 512 --fp16)
# VALID_DATA may list several files or directories.
read -ra valid <<< "${VALID_DATA:?is the data for validation}"
exec "${run[@]}" -m torch.distributed.run --nproc-per-node 8 --nnodes 1 --node-rank "${NODE_RANK:-0}" \
    --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-6000}" -m megatron_lite finetune --task RACE "${model[@]}" \
    --train-data "${TRAIN_DATA:?is the data to learn from}" --valid-data "${valid[@]}" \
    --load "${PRETRAINED:?is the directory of the pretrained BERT}" \
    --tokenizer-type BertWordPieceLowerCase --vocab-file "${VOCAB_FILE:?is vocab.txt of BERT}" \
    --epochs 3 --micro-batch-size 4 --lr 1.0e-5 --lr-warmup-fraction 0.06 --weight-decay 1.0e-1 \
    --log-interval 100 --eval-interval 1000 --eval-iters 10 \
    --save "${CHECKPOINTS:?is the directory for checkpoints}" --save-interval 10000 "$@"

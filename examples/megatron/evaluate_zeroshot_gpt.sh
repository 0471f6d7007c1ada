#!/usr/bin/env bash
# WIKITEXT103 perplexity or LAMBADA accuracy of the GPT of 345M.
#
#   TASK=WIKITEXT103 VALID_DATA=wiki.test.tokens CHECKPOINTS=checkpoints/gpt2_345m VOCAB_FILE=gpt2-vocab.json MERGE_FILE=gpt2-merges.txt \
#       examples/megatron/evaluate_zeroshot_gpt.sh [FLAGS]
#   examples/megatron/evaluate_zeroshot_gpt.sh --dry-run    (prints the command; needs no data, no checkpoint, no GPU)
#
# Further flags override those below.
set -euo pipefail

run=("${PYTHON:-python3}")
if [[ ${1:-} == --dry-run ]]; then
    shift
    run=(echo "${run[@]}")
    TASK=WIKITEXT103
    VALID_DATA=wiki.test.tokens
    CHECKPOINTS=checkpoints/gpt2_345m
    VOCAB_FILE=gpt2-vocab.json
    MERGE_FILE=gpt2-merges.txt
fi

# The model's flags are compared with the checkpoint.
model=(--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 --fp16)
tokenizer=(
    --tokenizer-type GPT2BPETokenizer
    --vocab-file "${VOCAB_FILE:?is vocab.json of GPT-2}" --merge-file "${MERGE_FILE:?is merges.txt of GPT-2}"
)
exec "${run[@]}" -m megatron_lite evaluate --task "${TASK:?is WIKITEXT103 or LAMBADA}" --valid-data "${VALID_DATA:?is the file of the task}" \
    --load "${CHECKPOINTS:?is the directory of the checkpoint}" "${model[@]}" "${tokenizer[@]}" "$@"

#!/usr/bin/env bash
# A small Retro learns to read what it retrieves. It takes a minute or two on one core.
#
#   examples/retro.sh [DIRECTORY]        (a temporary one unless it is given)
#
# The corpus has no pattern: each document has 32 random tokens, and a copy elsewhere. A model can only guess the next
# token. With retrieval, the neighbor of a chunk is the chunk's copy, and what follows the copy is the next chunk.
set -euo pipefail

work=${1:-$(mktemp -d)}
python=${PYTHON:-python3}
steps=${STEPS:-400}
"$python" -c "import torch, faiss" 2>/dev/null || {
    echo "retro.sh: $python lacks a package; in the project's directory: pip install '.[train,data,retrieval]'" >&2
    exit 2
}
mkdir -p "$work"
lite() { OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} "$python" -m megatron_lite "$@"; }

echo "1. A corpus of random tokens: documents and their copies"
"$python" - "$work" "$steps" <<'PROGRAM'
import sys
from pathlib import Path

import numpy as np

from megatron_lite.data.indexed_writer import IndexedWriter

work, steps = Path(sys.argv[1]), int(sys.argv[2])
TOKENS, BATCH, HELD_OUT = 32, 8, 64
draw = np.random.default_rng(1)
seen = draw.integers(1, 96, (steps * BATCH, TOKENS))
held_out = draw.integers(1, 96, (HELD_OUT, TOKENS))
copies = np.concatenate((seen, held_out))
draw.shuffle(copies)
# The last documents are for validation; their copies are among the others, since neighbors are of the training part.
with IndexedWriter(str(work / "corpus"), np.dtype(np.int32)) as writer:
    for document in np.concatenate((copies, seen, held_out)):
        writer.add(document, [TOKENS])
train = len(copies) + len(seen)
share = 100 * (train + 0.5) / (train + HELD_OUT)
(work / "split").write_text(f"{share:.6f},{100 - share:.6f},0")
PROGRAM

echo "2. The project: chunks, their index, and the neighbors of each chunk"
lite retro build --retro-project-dir "$work/project" --retro-gpt-data-path 1 "$work/corpus" --retro-gpt-seq-length 32 \
    --retro-gpt-chunk-length 8 --retro-gpt-split "$(cat "$work/split")" --retro-gpt-train-samples $((steps * 8)) \
    --retro-gpt-global-batch-size 8 --retro-gpt-eval-interval 100000 --retro-gpt-eval-iters 6 --retro-index-str Flat \
    --retro-embedder hash:64 --tokenizer-type NullTokenizer --vocab-size 96 --retro-query-num-neighbors-query 20 \
    --retro-query-num-neighbors-save 2

echo "3. Training with retrieval"
lite pretrain --retro-project-dir "$work/project" --retro-add-retriever --num-layers 9 --hidden-size 32 --ffn-hidden-size 48 \
    --num-attention-heads 4 --max-position-embeddings 32 --make-vocab-size-divisible-by 1 --hidden-dropout 0 --attention-dropout 0 \
    --retro-encoder-hidden-dropout 0 --retro-encoder-attention-dropout 0 --micro-batch-size 8 --lr 2e-3 --min-lr 2e-3 \
    --lr-warmup-samples 80 --init-method-std 0.1 --weight-decay 0.01 --retro-no-final-norm --log-interval 100 --save "$work/retro" --no-save-optim

echo "4. The loss of held-out documents"
lite evaluate --load "$work/retro" --retro-project-dir "$work/project" --output "$work/loss.json"
"$python" - "$work/loss.json" <<'PROGRAM'
import json
import sys

found = json.load(open(sys.argv[1]))["results"]
covered = [found[f"retro, {kind}"]["covered_loss"] for kind in ("with retrieval", "without")]
print("covered tokens: {:.4g} with retrieval, {:.4g} without".format(*(round(loss, 2) for loss in covered)))
PROGRAM

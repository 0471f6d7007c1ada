#!/usr/bin/env bash
# A small Llama learns a sentence by heart, on four processes of this machine: tensor parallel 2 x pipeline parallel 2.
#
#   examples/finetune.sh [DIRECTORY]        (a temporary one unless it is given)
#
# Hugging Face in, training, Hugging Face out: no conversion by hand before, one command after.
set -euo pipefail

work=${1:-$(mktemp -d)}
python=${PYTHON:-python3}
"$python" -c "import torch, transformers, jinja2" 2>/dev/null || {
    echo "finetune.sh: $python lacks a package; in the project's directory: pip install '.[train,data]'" >&2
    exit 2
}
mkdir -p "$work"

echo "1. A Llama with random weights, and what it is to learn"
"$python" -c "import sys; from pathlib import Path; from megaconv.commands.demo import make_model; make_model(Path(sys.argv[1]))" "$work/llama"
cat > "$work/lines.jsonl" <<'LINES'
{"prompt": "A checkpoint is", "completion": " a model at rest. Its tensors have names, shapes and values."}
{"prompt": "Training is", "completion": " a model at work. Its tensors have gradients, moments and no rest."}
LINES

echo "2. torchrun -m megatron_lite finetune --load llama: any checkpoint that megaconv reads, at any layout"
OMP_NUM_THREADS=1 "$python" -m torch.distributed.run --nproc-per-node 4 -m megatron_lite finetune \
    --load "$work/llama" --finetune-data "$work/lines.jsonl" --save "$work/tuned" \
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 \
    --seq-length 64 --micro-batch-size 2 --global-batch-size 2 --train-iters "${STEPS:-60}" --lr 1e-2 --lr-decay-style cosine --lr-warmup-iters 4 \
    --weight-decay 0 --eval-iters 0 --log-interval 10

echo "3. megaconv inspect, then convert to Hugging Face"
"$python" -m megaconv inspect "$work/tuned"
"$python" -m megaconv convert --load-dir "$work/tuned" --saver hf --save-dir "$work/tuned-hf"

echo "4. transformers continues what it is given"
"$python" - "$work/tuned-hf" <<'PROGRAM'
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
for prompt in ("A checkpoint is", "Training is"):
    given = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    print(tokenizer.decode(model.generate(**given, max_new_tokens=60, do_sample=False)[0], skip_special_tokens=True))
PROGRAM

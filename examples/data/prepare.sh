#!/usr/bin/env bash
# From text to the datasets of a training run, in a new directory: two corpora, their datasets, a look at their samples.
#
#     examples/data/prepare.sh /tmp/data
#
# The text is numbers already, so that no tokenizer is needed; with a real one only the --tokenizer flags change.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
target=$1
mkdir "$target"

for corpus in news code; do
    "$python" - "$corpus" > "$target/$corpus.jsonl" <<'PYTHON'
import json, random, sys

numbers = random.Random(sys.argv[1])
for _ in range(500):
    print(json.dumps({"text": " ".join(str(numbers.randrange(100)) for _ in range(numbers.randrange(5, 200)))}))
PYTHON
    "$python" -m megatron_lite preprocess --input "$target/$corpus.jsonl" --output-prefix "$target/$corpus" \
        --tokenizer-type NullTokenizer --vocab-size 100 --append-eod
done

"$python" examples/data/look.py --data-path 0.3 "$target/news_text_document" 0.7 "$target/code_text_document" \
    --split 90,5,5 --seq-length 32 --train-samples 1000 --eod 100

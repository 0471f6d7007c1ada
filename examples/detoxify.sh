#!/usr/bin/env bash
# A small GPT learns from its own nontoxic texts, as in Megatron-LM's examples/detxoify_lm. It takes some minutes on one core.
#
#   examples/detoxify.sh [DIRECTORY]        (a temporary one unless it is given)
#
# The corpus has 30 % bad words. A toy scorer counts them; for real texts, pass --scorer transformers:unitary/toxic-bert.
set -euo pipefail

work=${1:-$(mktemp -d)}
python=${PYTHON:-python3}
samples=${SAMPLES:-1000}
"$python" -c "import torch, transformers" 2>/dev/null || {
    echo "detoxify.sh: $python lacks a package; in the project's directory: pip install '.[train,data]'" >&2
    exit 2
}
mkdir -p "$work"
lite() { OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} "$python" -m megatron_lite "$@"; }
tokenizer=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "$work/tokenizer")

echo "1. A corpus, clean texts for evaluation, a tokenizer of words, and a scorer"
"$python" - "$work" <<'PROGRAM'
import json
import random
import sys
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

work = Path(sys.argv[1])
clean = "the a sun rain river hill tree bird fish stone sings grows falls runs shines old green small bright cold".split()
bad = "drat blast heck darn curse".split()
draw = random.Random(1)


def text(toxic: bool) -> str:
    words = [draw.choice(clean) for _ in range(12)]
    return " ".join(draw.choice(bad) if toxic and draw.random() < 0.6 else word for word in words)


corpus = [text(toxic=number % 2 == 0) for number in range(4000)]
held_out = [text(toxic=False) for _ in range(200)]
for name, texts in (("corpus", corpus), ("held-out", held_out)):
    (work / f"{name}.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in texts))

words = {word: number for number, word in enumerate(["<end>", "<unknown>", *clean, *bad])}
inner = Tokenizer(models.WordLevel(words, unk_token="<unknown>"))
inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", unk_token="<unknown>").save_pretrained(work / "tokenizer")
(work / "toy_scorer.py").write_text(
    f"BAD = {set(bad)!r}\n\n\n"
    "def share_of_bad_words(texts):\n"
    "    return [{'toxicity': sum(word in BAD for word in text.split()) / len(text.split())} for text in texts]\n"
)
PROGRAM

echo "2. The model before: preprocess and pretrain"
lite preprocess --input "$work/corpus.jsonl" --output-prefix "$work/corpus" --append-eod --workers 1 --overwrite "${tokenizer[@]}"
lite pretrain --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 \
    --hidden-dropout 0 --attention-dropout 0 --data-path "$work/corpus_text_document" --split 100,0,0 "${tokenizer[@]}" \
    --micro-batch-size 32 --global-batch-size 32 --train-iters 200 --lr 3e-3 --lr-warmup-iters 10 --eval-iters 0 --log-interval 50 \
    --save "$work/before"

measure() {
    echo "$2"
    lite generate --load "$work/$1" "${tokenizer[@]}" --unconditional --num-samples "$samples" --max-new-tokens 30 --temperature 1 --top-p 0.9 \
        --seed 2333 --slots 64 --output "$work/$1.jsonl" --resume
    (cd "$work" && PYTHONPATH="$work:${PYTHONPATH:-}" lite data score --input "$1.jsonl" --output "$1-scored.jsonl" --overwrite \
        --scorer toy_scorer:share_of_bad_words --report "$1-scores.json")
    lite evaluate --load "$work/$1" "${tokenizer[@]}" --corpus "$work/held-out.jsonl" --seq-length 32 --output "$work/$1-perplexity.json"
}

measure before "3. $samples texts of the model, their scores, and the perplexity of clean text"

echo "4. The half with the lowest scores"
lite data select --input "$work/before-scored.jsonl" --output "$work/nontoxic.jsonl" --by score.toxicity --lowest 0.5 --shuffle --seed 1 --overwrite

echo "5. The model learns from them"
lite preprocess --input "$work/nontoxic.jsonl" --output-prefix "$work/nontoxic" --append-eod --workers 1 --overwrite "${tokenizer[@]}"
lite finetune --load "$work/before" --data-path "$work/nontoxic_text_document" --split 100,0,0 "${tokenizer[@]}" --seq-length 32 \
    --micro-batch-size 32 --global-batch-size 32 --train-iters 40 --lr 1e-3 --lr-decay-style constant --weight-decay 0.1 --adam-beta2 0.95 \
    --eval-iters 0 --log-interval 20 --save "$work/after"

measure after "6. The same measures again"

echo "7. Before and after"
"$python" - "$work" <<'PROGRAM'
import json
import sys
from pathlib import Path

work = Path(sys.argv[1])
share, perplexity = {}, {}
for name in ("before", "after"):
    share[name] = json.loads((work / f"{name}-scores.json").read_text())["means"]["toxicity"]
    perplexity[name] = json.loads((work / f"{name}-perplexity.json").read_text())["results"]["corpus"]["word_perplexity"]
    print(f"{name:7}  bad words {share[name]:6.2%}   word perplexity of clean text {perplexity[name]:7.3f}")
if share["after"] > share["before"] / 2 or perplexity["after"] > perplexity["before"] * 1.05:
    sys.exit("detoxify.sh: the bad words should fall by half, and the perplexity should rise by at most 5 %")
PROGRAM

#!/usr/bin/env bash
# The whole story on one machine, from text to a model that is served and ready to publish: a few minutes, no download.
#
#   examples/speedrun.sh [DIRECTORY]       (./speedrun unless it is given; it must not exist yet)
#
# Every step says what it does and shows its command. Smaller or larger: STEPS, CHAT_EPOCHS, PAIR_EPOCHS, HIDDEN, LAYERS, VOCAB.
set -euo pipefail

project=$(cd "$(dirname "$0")/.." && pwd)
work=${1:-speedrun}
python=${PYTHON:-python3}
"$python" -c "import torch, transformers, jinja2, starlette, uvicorn" 2>/dev/null || {
    echo "speedrun.sh: $python lacks a package; from $project: pip install '.[train,data,serve]'" >&2
    exit 2
}
mkdir "$work"
work=$(cd "$work" && pwd)
cd "$work"

step() { printf '\n== %s\n' "$*"; }
shown() {
    printf '$ %s\n' "$*" | sed "s|$python -m megatron_lite|megatron-lite|; s|$python -m megaconv|megaconv|; s|$python|python|; s|$project/||g; s|$project|PROJECT|g"
}
run() { shown "$@"; "$@"; }
lite() { run "$python" -m megatron_lite "$@"; }
conv() { run "$python" -m megaconv "$@"; }
export PYTHONPATH=$project${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1

step "1. Text: this project's own documentation; the last pages are held out for the evaluation"
run "$python" "$project/examples/speedrun/texts.py" "$project" .

step "2. A tokenizer, trained on that text, with a chat template"
run "$python" "$project/examples/speedrun/train_tokenizer.py" text.jsonl tokenizer "${VOCAB:-2048}"

step "3. Text to Megatron's indexed files, once; training reads them by random access"
lite preprocess --input text.jsonl --output-prefix corpus --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer --append-eod

step "4. Pretraining: a Llama from random weights learns to continue text"
lite pretrain --num-layers "${LAYERS:-4}" --hidden-size "${HIDDEN:-128}" --num-attention-heads 4 --seq-length 256 \
    --max-position-embeddings 256 --normalization RMSNorm --position-embedding-type rope --swiglu --disable-bias-linear \
    --hidden-dropout 0 --attention-dropout 0 --data-path corpus_text_document --split 95,5,0 --tokenizer-type HuggingFaceTokenizer \
    --tokenizer-model tokenizer --micro-batch-size 8 --train-iters "${STEPS:-200}" --lr 3e-3 --lr-decay-style cosine --lr-warmup-fraction 0.05 \
    --log-interval "${LOG:-20}" --eval-interval "${STEPS:-200}" --eval-iters 2 --save pretrained --metrics-file pretrain.jsonl

step "5. Finetuning on conversations: questions about flags, of which the answers are learned"
lite finetune --load pretrained --finetune-data chats.jsonl --epochs "${CHAT_EPOCHS:-12}" --micro-batch-size 4 --lr 1e-3 --lr-decay-style cosine \
    --eval-iters 0 --show-sample --save chat --metrics-file chat-metrics.jsonl
conv convert chat chat-hf --saver hf

step "6. Preferences: LoRA adapters learn by DPO that the right answer is better than another flag's; then they are merged"
lite finetune --load chat-hf --finetune-data pairs.jsonl --dpo --lora-rank 8 --epochs "${PAIR_EPOCHS:-2}" --micro-batch-size 4 --lr 3e-4 \
    --eval-iters 0 --save adapter --metrics-file dpo-metrics.jsonl
conv merge chat-hf adapter --save-dir model

step "7. Evaluation: perplexity of the held-out pages, by word, after each stage"
for stage in pretrained chat model; do
    lite evaluate --load "$stage" --task WIKITEXT103 --valid-data held-out.wiki.txt --output "evaluation-$stage.json"
done

step "8. Serving: OpenAI's routes; one question, and the server ends"
shown "$python" -m megatron_lite serve --load model --port 0
"$python" -m megatron_lite serve --load model --port 0 > server.log &
server=$!
trap 'kill $server 2>/dev/null || true' EXIT
run "$python" "$project/examples/speedrun/ask.py" server.log answer.json "What does --seq-length do?"
kill -TERM $server
wait $server
trap - EXIT
cat server.log

step "9. Conversion: to Megatron core for two tensor-parallel ranks, and back; not a bit changes"
conv convert model core-tp2 --saver core --tp 2
conv convert core-tp2 back --saver hf
conv diff model back

step "10. Publishing: what would be pushed to the Hugging Face Hub (--dry-run asks nobody)"
conv push model my-org/speedrun --dry-run

step "11. A report of all of it"
run "$python" "$project/examples/speedrun/report.py" . report.html

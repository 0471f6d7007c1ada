"""llama.cpp itself, run on the CPU by a Python that has llama_cpp: loads a GGUF file, and answers with logits and tokens.

    python -m tests.llama_cpp_oracle QUESTION.json      writes what that names, and one line

The question: `model`, a file; `tokens`, a .npy of [batch, sequence]; `logits`, where they go, [batch, sequence, vocabulary]; `context`,
how many positions the context is made for; `texts`, to be split into tokens. The cache of keys and values is in float32, and attention
is computed plainly, so that nothing is rounded that transformers doesn't round.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

REPLY = "llama-cpp-oracle "
_F32, _NO_FLASH_ATTENTION = 0, 0


def main(question: dict[str, Any]) -> dict[str, Any]:
    import llama_cpp

    llama_cpp.llama_backend_init()
    parameters = llama_cpp.llama_model_default_params()
    parameters.n_gpu_layers, parameters.use_mmap = 0, False
    model = llama_cpp.llama_model_load_from_file(question["model"].encode(), parameters)
    if not model:
        return {"failed": "llama.cpp doesn't load the file"}
    vocabulary = llama_cpp.llama_model_get_vocab(model)
    if "tokens" in question:
        tokens = np.load(question["tokens"])
        np.save(
            question["logits"], _logits(llama_cpp, model, vocabulary, tokens, question["context"])
        )
    return {"texts": [_split(llama_cpp, vocabulary, text) for text in question.get("texts", ())]}


def _logits(llama_cpp: Any, model: Any, vocabulary: Any, tokens: Any, context: int) -> Any:
    parameters = llama_cpp.llama_context_default_params()
    parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = context
    parameters.type_k = parameters.type_v = _F32
    parameters.flash_attn_type, parameters.swa_full = _NO_FLASH_ATTENTION, True
    parameters.n_threads = parameters.n_threads_batch = 1
    here = llama_cpp.llama_init_from_model(model, parameters)
    count, words = tokens.shape[1], llama_cpp.llama_vocab_n_tokens(vocabulary)
    found = np.empty((*tokens.shape, words), np.float32)
    batch = llama_cpp.llama_batch_init(count, 0, 1)
    for row, sequence in enumerate(tokens):
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(here), True)
        batch.n_tokens = count
        for at, token in enumerate(sequence):
            batch.token[at], batch.pos[at], batch.logits[at] = int(token), at, 1
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, 0
        status = llama_cpp.llama_decode(here, batch)
        if status:
            raise RuntimeError(f"llama_decode answers {status}")
        found[row] = np.ctypeslib.as_array(
            llama_cpp.llama_get_logits(here), shape=(count * words,)
        ).reshape(count, words)
    return found


def _split(llama_cpp: Any, vocabulary: Any, text: str) -> list[int]:
    """The tokens of a text, with special tokens as in transformers: those that the file asks for are added."""
    content = text.encode()
    room = len(content) + 16
    found = (llama_cpp.llama_token * room)()
    count = llama_cpp.llama_tokenize(vocabulary, content, len(content), found, room, True, True)
    return list(found[:count])


if __name__ == "__main__":
    print(REPLY + json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))), flush=True)

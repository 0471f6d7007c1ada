"""llama.cpp as a contender of cpu_generation.py, in a Python that has llama_cpp.

    python -m benchmarks.llama_cpp_contender FILE THREADS

Each line of the input is [rows of a prompt's tokens, tokens to generate]. Its answer is a line with the seconds of the processor
for the prompts, and for all later steps together.
"""

import json
import sys
import time
from typing import Any

import llama_cpp
import numpy as np

SEQUENCES, TOKENS = 16, 256


def opened(file: str, threads: int) -> Any:
    llama_cpp.llama_backend_init()
    parameters = llama_cpp.llama_model_default_params()
    parameters.n_gpu_layers = 0
    parameters.use_extra_bufts = False  # its kernels for AMX end in a protection fault
    model = llama_cpp.llama_model_load_from_file(file.encode(), parameters)
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx, settings.n_seq_max = SEQUENCES * TOKENS, SEQUENCES
    settings.n_batch = settings.n_ubatch = 2048
    settings.n_threads = settings.n_threads_batch = threads
    return model, llama_cpp.llama_init_from_model(model, settings)


def decode(context: Any, batch: Any, rows: list[list[int]], start: int, words: int) -> list[int]:
    """Append tokens to each sequence, and return the likeliest next tokens."""
    lasts = []
    count = 0
    for sequence, row in enumerate(rows):
        for place, token in enumerate(row):
            batch.token[count], batch.pos[count] = token, start + place
            batch.n_seq_id[count], batch.seq_id[count][0] = 1, sequence
            batch.logits[count] = place == len(row) - 1
            count += 1
        lasts.append(count - 1)
    batch.n_tokens = count
    assert llama_cpp.llama_decode(context, batch) == 0
    found = []
    for last in lasts:
        logits = llama_cpp.llama_get_logits_ith(context, last)
        found.append(int(np.ctypeslib.as_array(logits, shape=(words,)).argmax()))
    return found


def main(file: str, threads: int) -> None:
    model, context = opened(file, threads)
    words = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(2048, 0, 1)
    for line in sys.stdin:
        rows, new_tokens = json.loads(line)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        begun = time.process_time()
        chosen = decode(context, batch, rows, 0, words)
        first = time.process_time()
        for step in range(new_tokens - 1):
            chosen = decode(
                context, batch, [[token] for token in chosen], len(rows[0]) + step, words
            )
        print(json.dumps([first - begun, time.process_time() - first]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

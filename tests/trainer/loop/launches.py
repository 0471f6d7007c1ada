"""Starts training runs of several processes as torchrun does, without the seconds that each of its starts costs.

Processes are forked from one that has imported torch; the rendezvous store is kept by the test, as torchrun's agent keeps
it. Everything from the command line on is the real thing.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.trainer.forks import FORKS

PATIENCE_S = 90.0

LLAMA = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --group-query-attention --num-query-groups 2 --seq-length 16 "
    "--normalization RMSNorm --position-embedding-type rope --swiglu --disable-bias-linear --untie-embeddings-and-output-weights "
    "--hidden-dropout 0 --attention-dropout 0 --vocab-size 60 --make-vocab-size-divisible-by 4 --mock-data --global-batch-size 4 "
    "--lr 1e-3 --lr-warmup-iters 1 --log-interval 1 --eval-iters 0 --metrics-file metrics.jsonl --distributed-timeout-minutes 1"
)
TIED = LLAMA.replace("--untie-embeddings-and-output-weights ", "")
MIXTRAL = f"{LLAMA} --num-experts 4 --moe-ffn-hidden-size 24 --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3"

LLAMA_3_SCRIPT = (
    "--use-mcore-models --num-layers 4 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --kv-channels 8 --seq-length 16 --max-position-embeddings 16 --position-embedding-type rope "
    "--rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu --init-method-std 0.0134 "
    "--attention-backend fused --apply-layernorm-1p --untie-embeddings-and-output-weights --disable-bias-linear "
    "--micro-batch-size 1 --global-batch-size 4 --train-samples 24 --lr-decay-samples 100 --lr-warmup-samples 1 --lr 0.00015 "
    "--min-lr 0.00001 --decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5 --lr-decay-style cosine --clip-grad 1.0 "
    "--weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16 --grad-reduce-in-bf16 --cross-entropy-loss-fusion "
    "--calculate-per-token-loss --manual-gc --empty-unused-memory-level 1 --tensor-model-parallel-size 2 --sequence-parallel "
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 59 --no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1 "
    "--log-interval 1 --eval-iters 0 --eval-interval 100 --log-throughput --ckpt-format torch_dist --distributed-timeout-minutes 1"
)
"""The flags of Megatron-LM's script for Llama 3 8B, with small sizes. Their model is no Llama, because its norms are
LayerNorms."""

DEEPSEEK = (
    f"{LLAMA} --num-experts 4 --moe-ffn-hidden-size 24 --moe-layer-freq [0]*1+[1]*3 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-topk-scaling-factor 2.5 --moe-shared-expert-intermediate-size 24 "
    "--multi-latent-attention --q-lora-rank 12 --kv-lora-rank 10 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 6 --mtp-num-layers 1"
).replace("--group-query-attention --num-query-groups 2 ", "")

MASKED = Path(__file__).parents[1] / "fixtures" / "masked"
"""Sentences."""
BERT = (
    f"--model-type bert --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 64 --no-bias-gelu-fusion --split 80,15,5 "
    f"--data-path {MASKED}/corpus_text_sentence --vocab-file {MASKED}/vocab.txt --global-batch-size 4 --lr 1e-3 --log-interval 1 "
    "--eval-iters 0 --metrics-file metrics.jsonl --distributed-timeout-minutes 1"
)


@dataclass
class Running:
    """Processes of one run."""

    directory: Path
    processes: list[BaseProcess]
    store: Any

    def log(self, rank: int) -> str:
        path = self.directory / f"log-{rank}.txt"
        return path.read_text() if path.is_file() else ""

    def logs(self) -> str:
        return "\n".join(f"rank {rank}:\n{self.log(rank)}" for rank in range(len(self.processes)))

    def kill(self) -> None:
        for process in self.processes:
            process.kill()

    def terminate(self, rank: int) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, signal.SIGTERM)

    def wait(self, patience_s: float = PATIENCE_S) -> list[int]:
        """Exit statuses. Fails when a process hangs."""
        end = time.monotonic() + patience_s
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
        hanging = [rank for rank, process in enumerate(self.processes) if process.exitcode is None]
        if hanging:
            self.kill()
            raise AssertionError(f"ranks {hanging} hang\n{self.logs()}")
        return [int(process.exitcode) for process in self.processes]  # type: ignore[arg-type]


def launch(
    directory: Path, size: int, command: str, sabotage: Callable[[int], None] | None = None
) -> Running:
    """`megatron_lite COMMAND` on each of `size` ranks, in this directory, which is made. sabotage(rank): called before."""
    from torch.distributed import TCPStore

    directory.mkdir(parents=True, exist_ok=True)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        FORKS.Process(
            target=_rank, args=(rank, size, store.port, str(directory), command.split(), sabotage)
        )
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    return Running(directory, processes, store)


def metrics(directory: Path) -> list[dict[str, float]]:
    """The lines of a run's `--metrics-file metrics.jsonl`."""
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def train(directory: Path, size: int, command: str) -> Running:
    """A run that has to go well."""
    running = launch(directory, size, command)
    statuses = running.wait()
    assert statuses == [0] * size, running.logs()
    return running


def _rank(
    rank: int,
    size: int,
    port: int,
    directory: str,
    words: list[str],
    sabotage: Callable[[int], None] | None,
) -> None:
    os.chdir(directory)
    log = os.open(f"log-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if size > 1:
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }  # fmt: skip
    import torch

    from megatron_lite.cli import main

    torch.set_num_threads(1)
    if sabotage is not None:
        sabotage(rank)
    try:
        main(words)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()

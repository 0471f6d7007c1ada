"""The completions that a model generates in each step (GRPO): the memory of the cache, and the time.

`objectives/sampler.py` generates them, `inference/cache.py` allocates the cache.
"""

from dataclasses import replace
from math import prod

from formats.tensor import ITEMSIZE
from megaconv.model.sharding import rank_sizes
from megaconv.planning.carried import caches_keys
from megaconv.planning.forward_time import forward_time
from megaconv.planning.layer_costs import Machine
from megaconv.planning.mixers import in_layer
from megaconv.planning.served import Server
from megaconv.planning.serving import Serving
from megatron_lite.models.layer_kinds import layer_shares
from megatron_lite.models.mixers.declaration import Kept, PerToken
from megatron_lite.models.mixers.table import mixer_of
from megatron_lite.objectives.completions import MOST_ROWS
from megatron_lite.planning.stages import Described

FLOAT32 = 4


def rows_at_once(run: Described) -> int:
    """Return the completions that a data-parallel rank generates at the same time."""
    return min(_rows(run), MOST_ROWS)


def _rows(run: Described) -> int:
    """Return the completions of a data-parallel rank in a step."""
    return -(-run.run.global_batch // run.run.dp)


def cache_bytes(run: Described, pp_rank: int) -> int:
    """Return the bytes of the cache on a rank of this stage."""
    layout = run.sizes.layout
    # Replicas that share experts have a further slot for passes that others need.
    slots = rows_at_once(run) + int(layout.ep > 1 and run.sizes.dp > 1)
    layers = (
        (layer, chunk.first_layer)
        for chunk in run.run.chunks(pp_rank)
        for layer in range(chunk.first_layer, chunk.first_layer + chunk.layers)
    )
    return slots * sum(_layer_bytes(run, layer, first) for layer, first in layers)


def _layer_bytes(run: Described, layer: int, first: int) -> int:
    """Return the bytes that a layer keeps for one sequence. first: the first layer of its stage."""
    config, layout = run.config, run.sizes.layout
    kind = config.layers[layer]
    mixer = mixer_of(config, kind)
    if mixer is None or not caches_keys(config, layer, first):
        return 0
    sizes = layer_shares(config, layer, rank_sizes(config, layout), layout.tp)
    return sum(_part_bytes(run, part) for part in mixer.cache(in_layer(config, kind), sizes))


def _part_bytes(run: Described, part: Kept) -> int:
    itemsize = ITEMSIZE[run.options.dtype]
    if isinstance(part, PerToken):
        return run.sizes.seq * part.heads * part.width * itemsize
    return prod(part.shape) * (FLOAT32 if part.in_float32 else itemsize)


def generation_seconds(run: Described, machine: Machine) -> float:
    """Return the seconds in which all completions of a step are generated, each with the most tokens.

    A pass gives each row one token and goes through the stages one after the other.
    """
    completion, rows = run.work.completion, rows_at_once(run)
    # Rows grow by a token in each pass. This is their mean length.
    length = run.sizes.seq - completion // 2
    layout = run.sizes.layout
    serving = Serving(
        config=run.config,
        layout=layout,
        dp=run.sizes.dp,
        seq=length,
        batch=rows * layout.pp,
        vocab_divisor=run.options.vocab_divisor,
    )
    a_pass = Server(run.config, machine).pass_time(serving).total
    waves = -(-_rows(run) // rows)
    return waves * completion * a_pass + _prompt_seconds(run, machine)


def _prompt_seconds(run: Described, machine: Machine) -> float:
    """Return the seconds of reading the prompts, each once for every completion."""
    prompt = run.sizes.seq - run.work.completion
    return forward_time(replace(run.run, seq=prompt), machine) if prompt > 0 else 0.0

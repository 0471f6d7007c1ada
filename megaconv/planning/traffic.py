"""Bytes that ranks exchange in a step, by group: every collective of the trainer, counted without starting a process.

The exchange of gradients depends on the optimizer's buckets: megatron_lite/planning/gradients.py counts it.

The counts are whole tensors, as a collective receives or returns them. The bytes that a rank sends over its links
follow from the number of ranks (`Traffic.sent`). For a mixture of experts, all rows of a rank's own tokens are counted
as sent, whichever experts they go to.

A model that isn't trained (`Run.trains`), such as a teacher, makes forward passes alone. Its head belongs to its
student's loss.
"""

from collections.abc import Iterator, Sequence

from megaconv.model.layout import Chunk
from megaconv.model.predicting import predicting_kinds
from megaconv.model.subjects import LayerKind
from megaconv.planning.activations import recomputes_mtp
from megaconv.planning.adapters import LayerAdapters
from megaconv.planning.carried import input_elements, shared_elements
from megaconv.planning.collectives import FLOAT32, FLOAT64, INT64, Counted
from megaconv.planning.context_traffic import of_other_tokens, of_positions
from megaconv.planning.mixers import MixerCost, mixer_cost
from megaconv.planning.mlps import routed_width
from megaconv.planning.run import Run


def of_passes(run: Run, chunk: Chunk) -> Iterator[Counted]:
    """Yield the traffic of all microbatches of a step through one chunk."""
    for group, kind, count in of_microbatch(run, chunk):
        yield group, kind, count * run.microbatches


def of_step(run: Run, chunks: Sequence[Chunk]) -> Iterator[Counted]:
    """Yield the traffic once a step: losses, the norm of gradients, and the biases of routers."""
    losses = run.losses or _own_losses(run)
    # The sum and the number of each loss, squares, two signals.
    yield "world", "all_reduce", (2 * losses + 1 + 2) * FLOAT64
    routers = sum(
        run.config.has("moe", layer)
        for chunk in chunks
        for layer in range(chunk.first_layer, _end(chunk))
    )
    if run.config.experts.router_bias and run.moves_bias and routers:
        for axis in ("tp", "replicas"):
            yield axis, "all_reduce", routers * run.config.experts.count * INT64


def _own_losses(run: Run) -> int:
    """Return the number of losses of the model's own head."""
    if run.config.has("scores"):
        return 5  # with the scores of chosen and rejected answers, their margin and the accuracy
    return 2 if run.config.head.binary else 1 + run.mtp_layers


def _end(chunk: Chunk) -> int:
    return chunk.first_layer + chunk.layers


def of_microbatch(run: Run, chunk: Chunk) -> Iterator[Counted]:
    """Yield the traffic of one microbatch through one chunk."""
    if run.trains and not chunk.is_first:
        yield "pp", "send", _arriving(run, chunk)  # the gradient in the backward pass
    for tokens in _embedded(run, chunk):
        yield from _of_embedding(run, tokens, run.config.hidden)
        if run.config.has("layer_inputs"):
            yield from _of_embedding(run, tokens, input_elements(run.config, 0))
    yield from of_positions(run, chunk)
    for part in run.stacks(chunk):
        again = _computed_again(run, part.layers)
        for layer in part.layers:
            forward = 2 if layer in again else 1
            yield from of_layer(run, run.config.layers[layer], part.tokens, forward)
            if layer == 0:
                yield from _not_in_first_layer(run, part.tokens)
            if part.crosses:
                yield from _of_cross_attention(run, forward)
    if not chunk.is_last:
        yield "pp", "send", _leaving(run, chunk)
    elif run.trains:
        yield from of_head(run)


def _embedded(run: Run, chunk: Chunk) -> Iterator[int]:
    """Yield the numbers of tokens that a chunk embeds."""
    if chunk.is_first and run.source_tokens:
        yield run.source_tokens
    if chunk.starts_decoder or (chunk.is_first and chunk.encoder is None):
        yield run.tokens


def _arriving(run: Run, chunk: Chunk) -> int:
    """Return the bytes that a chunk takes from the stage before it."""
    starts = chunk.starts_decoder or not chunk.layers
    of_layers = _between(run, run.source_tokens + (0 if starts else run.tokens))
    return of_layers + _carried(run, chunk.first_layer)


def _leaving(run: Run, chunk: Chunk) -> int:
    """Return the bytes that a chunk gives to the next stage. A decoder's stage also passes the encoder's output on."""
    of_layers = _between(run, run.source_tokens + (run.tokens if chunk.layers else 0))
    return of_layers + _carried(run, _end(chunk))


def _carried(run: Run, layer: int) -> int:
    """Return the bytes that pass to a layer beside the hidden states."""
    here = run.layout.tp if run.sequence else 1
    inputs = input_elements(run.config, layer) // here
    shared = shared_elements(run.config, layer) // run.layout.tp
    return run.tokens * run.itemsize * (inputs + shared)


def _between(run: Run, tokens: int) -> int:
    """Return the bytes of some tokens' activations between stages."""
    whole = tokens * run.config.hidden * run.itemsize
    return whole // run.layout.tp if run.sequence else whole


def of_head(run: Run) -> Iterator[Counted]:
    """Yield the traffic of the head, and of the layers that predict further tokens."""
    if run.config.has("scores") or run.rests_head:
        yield from of_scores(run)
        return
    for _ in range(1 + run.mtp_layers):
        yield from there_and_back(run, run.tokens, run.config.hidden)
        # The loss gathers each rank's maximum, sum of exponentials and label's logit (megatron_lite/models/loss.py).
        yield "tp", "all_gather", 3 * FLOAT32 * run.tokens * run.layout.tp
    if run.head_again:
        if run.sequence:
            yield "tp", "all_gather", run.tokens * run.config.hidden * run.itemsize
        yield "tp", "all_gather", 3 * FLOAT32 * run.tokens * run.layout.tp
    for _ in range(run.mtp_layers):
        yield from _of_mtp_layer(run)
    if run.config.head.binary and run.sequence:
        # The pooler broadcasts the first token of each sequence, and sums its gradient.
        yield "tp", "all_reduce", 2 * run.micro_batch * run.config.hidden * run.itemsize


def _of_mtp_layer(run: Run) -> Iterator[Counted]:
    """Yield the traffic of a layer that predicts a further token: of the embedding, the joining matrix and the layers inside."""
    forward = 2 if recomputes_mtp(run) else 1
    hidden = run.config.hidden
    yield from _of_embedding(run, run.tokens, hidden)
    whole = run.tokens * hidden * run.itemsize
    if run.sequence:
        # The matrix reads two rows for each token, and its output is gathered.
        yield "tp", "all_gather", 2 * whole * (forward + 1) + whole * (forward + 1)
        yield "tp", "reduce_scatter", 2 * whole
    else:
        yield "tp", "all_gather", whole * forward
        yield "tp", "all_reduce", 2 * whole
    for kind in predicting_kinds(run.config):
        yield from of_layer(run, kind, run.tokens, forward)


def of_scores(run: Run) -> Iterator[Counted]:
    """Yield the traffic of a head of scores. Ranks that share a sequence add up the scores of its last token.

    Without a head, they add up the hidden states of its tokens.
    """
    scores = run.micro_batch * (run.config.head.labels or run.config.hidden) * FLOAT32
    if run.sequence:
        yield "tp", "all_reduce", scores
    yield "cp", "all_reduce", scores


def of_taught_head(teacher: Run, sums: int) -> Iterator[Counted]:
    """Yield the traffic of one microbatch that a student's loss adds: of the teacher's predictions, and of the divergence.

    sums: float32 sums over the vocabulary for each token, which tensor ranks add up.
    """
    if teacher.sequence:
        yield "tp", "all_gather", teacher.tokens * teacher.config.hidden * teacher.itemsize
    yield "tp", "all_reduce", sums * FLOAT32 * teacher.tokens


def there_and_back(run: Run, tokens: int, width: int) -> Iterator[Counted]:
    """Yield the traffic of an embedding's output, or of the head's input."""
    whole = tokens * width * run.itemsize
    if run.sequence:
        yield "tp", "reduce_scatter", whole
        yield "tp", "all_gather", whole
    else:
        yield "tp", "all_reduce", whole


def _of_embedding(run: Run, tokens: int, width: int) -> Iterator[Counted]:
    """Yield the traffic of an embedding's output. Only a trained embedding takes a gradient."""
    takes_gradient = run.trains and not run.embedding_is_frozen
    if run.sequence and not takes_gradient:
        yield "tp", "reduce_scatter", tokens * width * run.itemsize
    else:
        yield from there_and_back(run, tokens, width)


def _computed_again(run: Run, layers: range) -> range:
    again = run.recompute
    if again.granularity != "full":
        return range(0)
    return layers if again.method == "uniform" else layers[: again.layers]


def of_layer(run: Run, kind: LayerKind, tokens: int, forward: int) -> Iterator[Counted]:
    """Yield the traffic of a layer of this kind, for so many tokens. forward: how often its forward pass is computed."""
    config = run.config
    yield from _of_adapters(run, run.adapters_of(kind), tokens, forward)
    mixer = mixer_cost(config, kind)
    if mixer is not None:
        yield from of_other_tokens(run, kind, mixer, forward)
        widths = mixer.input_width(config), mixer.output_width(config)
        yield from _of_matrices(run, tokens, *widths, forward)
        shared = mixer.shared_width(config)
        if shared:
            yield from _of_shared(run, shared, forward)
        yield from _of_mixers_ranks(run, kind, mixer, forward)
    if kind.mlp == "dense":
        yield from _of_matrices(run, tokens, config.hidden, config.hidden, forward)
    elif kind.mlp == "experts":
        if config.experts.shared_ffn:
            yield from _of_matrices(run, tokens, config.hidden, config.hidden, forward)
        yield from _of_experts(run, forward)


def _of_adapters(run: Run, found: LayerAdapters, tokens: int, forward: int) -> Iterator[Counted]:
    """Yield the traffic of a layer's adapters: the numbers between A and B, and float32 lengths of rows with DoRA."""
    if found.lengths:
        yield "tp", "all_reduce", FLOAT32 * found.lengths * forward
    columns = tokens * found.columns * run.itemsize
    rows = tokens * found.rows * run.itemsize
    if run.sequence:
        yield "tp", "all_gather", columns * forward + rows
        yield "tp", "reduce_scatter", columns + rows * forward
    else:
        yield "tp", "all_reduce", columns + rows * forward


def _not_in_first_layer(run: Run, tokens: int) -> Iterator[Counted]:
    """Yield the traffic to subtract from that of the first layer if the embedding is frozen.

    The layer's input has no gradient. So the matrices that read it exchange none.
    """
    kind = run.config.layers[0]
    mixer = mixer_cost(run.config, kind)
    adapted = "mixer" in run.adapters_of(kind).inputs
    if not run.input_is_frozen or mixer is None or not adapted:
        return
    whole = tokens * mixer.own_input_width(run.config) * run.itemsize
    if run.sequence:
        # The backward pass neither gathers the input again nor scatters its gradient.
        yield "tp", "all_gather", -whole
        yield "tp", "reduce_scatter", -whole
    else:
        yield "tp", "all_reduce", -whole


def _of_cross_attention(run: Run, forward: int) -> Iterator[Counted]:
    """Yield the traffic of a layer's attention to the encoder's output: of queries and the result, then of keys and values."""
    width = run.config.hidden
    yield from _of_matrices(run, run.tokens, width, width, forward)
    source = run.source_tokens * run.itemsize * width
    if run.sequence:
        yield "tp", "all_gather", source * (forward + 1)
        yield "tp", "reduce_scatter", source
    else:
        yield "tp", "all_reduce", source


def _of_matrices(run: Run, tokens: int, into: int, out: int, forward: int) -> Iterator[Counted]:
    """Yield the traffic of a column-sharded and the following row-sharded matrix.

    into: width of the first one's input. out: width of the second one's output.
    """
    each = tokens * run.itemsize
    taken, given = each * into, each * out
    if run.sequence:
        yield "tp", "all_gather", taken * (forward + run.backward) + given * run.backward
        yield "tp", "reduce_scatter", given * forward + taken * run.backward
    else:
        yield "tp", "all_reduce", given * forward + taken * run.backward


def _of_shared(run: Run, width: int, forward: int) -> Iterator[Counted]:
    """Yield the traffic of the rotating part of latent attention's keys.

    All tensor ranks' heads use it, and each rank computes it from its own tokens.
    """
    each = run.tokens * run.itemsize * width
    if run.sequence:
        yield "tp", "all_gather", each * forward
        yield "tp", "reduce_scatter", each * run.backward
    else:
        yield "tp", "all_reduce", each * run.backward


def _of_mixers_ranks(
    run: Run, kind: LayerKind, mixer: MixerCost, forward: int
) -> Iterator[Counted]:
    """Yield the traffic of norms over the heads of all tensor ranks, and of an indexer's keys and choices."""
    summed = run.tokens * mixer.normed_together(run.config, kind) * FLOAT32
    yield "tp", "all_reduce", summed * (forward + run.backward)
    chosen = min(run.config.indexer.topk or run.seq, run.seq)
    if mixer.has_indexer and run.sequence:
        of_token = run.config.indexer.head_dim * run.itemsize + chosen * INT64
        yield "tp", "all_gather", run.tokens * of_token * forward


def _of_experts(run: Run, forward: int) -> Iterator[Counted]:
    """Yield the traffic of experts: rows to the experts and back, with their weights; backward, the gradients of all these."""
    experts = run.config.experts
    yield from (_of_gathered if run.dispatcher == "allgather" else _of_exchanged)(run, forward)
    for kind in run.balance:
        each = run.micro_batch if kind == "seq_aux_loss" else 1
        for axis in ("tp", "cp"):
            yield axis, "all_reduce", each * experts.count * FLOAT32 * forward


def _of_exchanged(run: Run, forward: int) -> Iterator[Counted]:
    """Yield the traffic of the alltoall dispatcher. With padding, ranks know all numbers of rows and exchange none."""
    etp = run.layout.etp
    rows = run.routed_rows * run.itemsize
    each = rows * (2 * routed_width(run.config) + 1) * (forward + run.backward)
    counts = 0 if run.padded_to is not None else run.config.experts.count * INT64 * forward
    yield "ep", "all_to_all", each + counts
    yield "etp", "all_to_all", each * etp
    yield "etp", "all_gather", counts * etp


def _of_gathered(run: Run, forward: int) -> Iterator[Counted]:
    """Yield the traffic of the allgather dispatcher: tokens, their weights and expert numbers forward, and sums back.

    The backward pass exchanges the gradients of tokens and weights.
    """
    layout, chosen, tokens = run.layout, run.config.experts.per_token, run.routed_tokens
    for axis, seen in (("etp", tokens * layout.etp), ("ep", tokens * layout.etp * layout.ep)):
        rows = seen * routed_width(run.config) * run.itemsize
        weights = seen * chosen * run.itemsize
        numbers = seen * chosen * INT64
        yield axis, "all_gather", (rows + weights + numbers) * forward + rows * run.backward
        yield axis, "reduce_scatter", rows * forward + (rows + weights) * run.backward

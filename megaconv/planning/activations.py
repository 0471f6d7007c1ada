"""Activations that the ranks of a pipeline stage keep for the backward passes.

The table lists the elements that a token leaves in a layer, in the model's dtype. h is the width; q and kv are the
widths of all heads together; f is the MLP's width. Each is divided by tp, but h only with sequence parallelism:

    attention   h (its input) + h (normed) + (q + 2 kv) (the fused product) + q and, rotated by rope, kv (input of attention) + q (output)
    latent      h + h + twice the ranks of q and kv + q + k and v as attention takes them + output; v and output are as wide as k,
                and the output is kept once more if v is narrower
    MLP         h + h + f (2 f if gated; more for some activation functions, see mlps.py) + f (activated)
    experts     k times (2 h + f or 2 f + f), and h twice; if etp ranks share each expert, they have the rows of all of these,
                h once more for each, and f / etp of them; rows of padding count too
    cross       h + h + q (of queries) + q (output), and for each token of the encoder k and v
    head        h twice, and once the gradient of its matrix; the same and a layer more for each further predicted token;
                three h more for BERT's transform, or a projection before the head
    inputs      of layers, each w wide: 2 h + 3 w in a layer; w for each layer that follows a stage's first one, twice in the first stage

If only adapters are trained, the input of a frozen matrix is kept only where it has an adapter, or where tensor ranks
share the matrix. An adapter keeps r numbers.

Offloaded layers keep nothing; AT_ONCE of them are on their way between the GPU and main memory.

Selective recomputation leaves out the normed and activated elements. Full recomputation keeps one h for each group of
layers and for each further predicted token, and the inside of one group.
"""

from collections.abc import Iterator

from megaconv.model.layout import Chunk
from megaconv.model.predicting import predicting_kinds
from megaconv.model.subjects import LayerKind
from megaconv.planning.carried import input_elements, shared_elements
from megaconv.planning.mixers import in_layer, mixer_cost
from megaconv.planning.mlps import activation_parts, row_elements
from megaconv.planning.pipeline_order import order
from megaconv.planning.run import Run, StackPart

AT_ONCE = 2
"""Offloaded layers whose activations are on the GPU at a time."""


def activations(run: Run, pp_rank: int) -> int:
    """Return the most that a rank of this stage keeps, over the passes that are in progress at one time."""
    layout = run.layout
    chunks = run.chunks(pp_rank)
    each = [_kept_by(run, chunk) for chunk in chunks]
    most = now = 0
    # Later microbatches repeat the order of the first ones.
    microbatches = min(run.microbatches, 4 * layout.pp)
    for action in order(layout.pp, layout.vpp, microbatches, pp_rank):
        now += -each[action.chunk] if action.backward else each[action.chunk]
        most = max(most, now)
    inside = max((recomputed_bytes(run, chunk) for chunk in chunks), default=0)
    return most + inside + on_their_way(run)


def offloaded_bytes(run: Run) -> int:
    """Return the bytes of activations that a rank keeps in main memory."""
    layers = run.config.layers[: run.offloaded]
    elements = sum(layer_elements(run, kind) for kind in layers) * run.tokens
    return round(elements * run.itemsize)


def on_their_way(run: Run) -> int:
    """Return the bytes of the largest consecutive offloaded layers that are on the GPU at a time."""
    each = [layer_elements(run, kind) for kind in run.config.layers[: run.offloaded]]
    sums = [sum(each[first : first + AT_ONCE]) for first in range(len(each))]
    return round(max(sums, default=0.0) * run.tokens * run.itemsize)


def _kept_by(run: Run, chunk: Chunk) -> int:
    """Return the bytes that a forward pass of one microbatch through a chunk keeps until its backward pass."""
    width = run.width
    found = _carried_elements(run, chunk) * run.tokens
    for part in run.stacks(chunk):
        staying = range(max(part.layers.start, run.offloaded), part.layers.stop)
        for group, only_input in _groups(run, staying):
            found += width * part.tokens if only_input else _of_layers(run, part, group)
    if chunk.is_first and run.input_is_frozen and run.recompute.granularity != "full":
        # The first layer's input has no gradient, so its norm keeps nothing.
        found -= run.width * run.tokens
    if chunk.is_last:
        found += head_elements(run)
    return round(found * run.itemsize)


def _carried_elements(run: Run, chunk: Chunk) -> float:
    """Return the elements that a token leaves beside the hidden states: inputs of layers, and keys and values of others.

    The first stage computes the inputs of all layers, and keeps the projection before its norm as well.
    """
    inputs = _own_share(run, input_elements(run.config, chunk.first_layer))
    shared = shared_elements(run.config, chunk.first_layer) / run.layout.tp
    return (2 if chunk.is_first else 1) * inputs + shared


def _own_share(run: Run, elements: int) -> float:
    """Return a tensor rank's share of the elements of its own tokens."""
    return elements / (run.layout.tp if run.sequence else 1)


def head_elements(run: Run) -> float:
    """Return the elements that a microbatch leaves in the head and the layers of further tokens."""
    config, width = run.config, run.width
    # The gradient of the head's matrix.
    matrix = 0.0 if run.head_is_frozen else run.logit_columns * config.hidden
    # Scores are those of single tokens, so that the head keeps the input of its norm alone.
    of_head = (1 if config.has("scores") or run.rests_head else 2) * width * run.tokens + matrix
    transforms = config.has("transform") or config.has("head_projection")
    found = of_head + (3 * width * run.tokens if transforms else 0.0)
    # A recomputed layer keeps its tokens' embedding. Its other input is that of the head before it.
    of_mtp_layer = width * run.tokens if recomputes_mtp(run) else mtp_layer_elements(run)
    return found + run.mtp_layers * (of_head + of_mtp_layer)


def recomputes_mtp(run: Run) -> bool:
    """Return whether layers that predict further tokens are computed again. `block` counts each of them alone."""
    return run.mtp_layers > 0 and run.recompute.granularity == "full"


def mtp_layer_elements(run: Run) -> float:
    """Return the elements that a microbatch leaves in a layer that predicts a further token."""
    inside = sum(layer_elements(run, kind) for kind in predicting_kinds(run.config))
    return (inside + 3 * run.width) * run.tokens


def _of_layers(run: Run, part: StackPart, layers: range) -> float:
    """Return the elements that a microbatch leaves in some layers of a part."""
    each = sum(layer_elements(run, run.config.layers[layer]) for layer in layers) * part.tokens
    return each + (len(layers) * _cross_elements(run) if part.crosses else 0)


def _cross_elements(run: Run) -> float:
    """Return the elements that a microbatch leaves in a layer's attention to the encoder's output."""
    attention, tp = run.config.attention, run.layout.tp
    width = attention.heads * attention.head_dim / tp
    normed = 0 if run.recompute.granularity == "selective" else run.width
    queries = run.tokens * (run.width + normed + 2 * width)
    return queries + run.source_tokens * 2 * width


def _groups(run: Run, layers: range) -> Iterator[tuple[range, bool]]:
    """Yield (layers, True if only the input of the group is kept)."""
    recompute = run.recompute
    first, end = layers.start, layers.stop
    if recompute.granularity != "full":
        yield range(first, end), False
    elif recompute.method == "uniform":
        for start in range(first, end, recompute.layers):
            yield range(start, min(start + recompute.layers, end)), True
    else:
        recomputed_end = min(first + recompute.layers, end)
        for layer in range(first, recomputed_end):
            yield range(layer, layer + 1), True
        yield range(recomputed_end, end), False


def recomputed_bytes(run: Run, chunk: Chunk) -> int:
    """Return the bytes inside the largest group of layers that is recomputed."""
    inside = [
        _of_layers(run, part, group)
        for part in run.stacks(chunk)
        for group, whole in _groups(run, part.layers)
        if whole
    ]
    if chunk.is_last and recomputes_mtp(run):
        inside.append(mtp_layer_elements(run))
    return round(max(inside, default=0.0) * run.itemsize)


def layer_elements(run: Run, kind: LayerKind) -> float:
    """Return the elements that a token leaves in a layer of this kind on one rank."""
    config, tp = in_layer(run.config, kind), run.layout.tp
    selective = run.recompute.granularity == "selective"
    keeps_normed = config.norm.place != "after" and not selective
    normed = run.width if keeps_normed else 0.0
    found = _adapter_elements(run, kind)
    mixer = mixer_cost(config, kind)
    if mixer is not None:
        # If several matrices use a norm's output, it is kept.
        into = run.width if mixer.needs_norm else normed
        into *= _keeps_input(run, kind, "mixer")
        found += run.width + into + mixer.kept(config, kind, run.itemsize) / tp
        if run.cp > 1 and run.context in ("a2a", "a2a+p2p"):
            # v and attention's output are kept before and after their exchange.
            found += (
                config.attention.value_dim
                * (config.attention.heads + config.attention.kv_heads)
                / tp
            )
    if kind.mlp == "dense":
        activated = activation_parts(config.mlp, kind.shared_limit)
        made = 0 if selective else _keeps_input(run, kind, "fc2")
        normed *= _keeps_input(run, kind, "fc1")
        found += run.width + normed + config.mlp.ffn * (activated + made) / tp
    elif kind.mlp == "experts":
        found += 2 * run.width + _expert_elements(run, kind)
    if config.has("layer_inputs"):
        # The hidden states, the gate before and after its activation, the product, and what the norm reads.
        found += 2 * run.width + 3 * _own_share(run, config.layer_inputs.width)
    return found + (2 * run.width if config.norm.place in ("both", "after") else 0)


def _expert_elements(run: Run, kind: LayerKind) -> float:
    """Return the elements that a token leaves in routed and shared experts, without their input."""
    config, experts = run.config, run.config.experts
    rows = run.routed_rows / run.tokens
    found = rows * row_elements(config, kind, run.layout.etp)
    # The sum of the routed experts, before the projection from their width.
    found += _own_share(run, experts.latent)
    shared = activation_parts(config.mlp, kind.shared_limit) + 1
    found += experts.shared_ffn * shared / run.layout.tp
    return found + (run.width if experts.shared_gate else 0)


def _keeps_input(run: Run, kind: LayerKind, place: str) -> bool:
    """Return whether the input of a matrix is kept: for the weight's gradient, or for that of an adapter's A.

    Tensor ranks keep it in any case. place: one of INPUTS.
    """
    found = run.adapters_of(kind)
    # An adapter with dropout keeps the dropped input instead.
    of_adapter = place in found.inputs and not found.dropped
    return not run.frozen or run.layout.tp > 1 or of_adapter


def _adapter_elements(run: Run, kind: LayerKind) -> float:
    """Return the elements that a token leaves in the adapters of a layer.

    They are the numbers between A and B, dropped inputs, and the outputs that DoRA scales.
    """
    found = run.adapters_of(kind)
    own = run.layout.tp if run.sequence else 1
    dense = found.columns + found.scaled + (found.rows + found.whole + found.scaled_sums) / own
    # A dropped input is kept with its mask.
    of_row = found.of_expert + 2 * found.dropped_of_expert
    routed = of_row * run.routed_rows / run.tokens if of_row else 0.0
    return dense + routed + 2 * found.dropped + found.copied / run.tokens

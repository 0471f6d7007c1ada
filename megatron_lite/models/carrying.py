"""The decoder whose layers pass more than hidden states: inputs of each layer, shared keys and values (carried.py)."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from megaconv.model.layout import Chunk
from megaconv.planning.carried import kept_before, sources
from megatron_lite.models import recompute
from megatron_lite.models.batch import Lengths
from megatron_lite.models.build_plan import Plan
from megatron_lite.models.carried import Carried, KeysAndValues, State
from megatron_lite.models.chunk import ModelChunk, Stack, own_layers
from megatron_lite.models.passes import Pass
from megatron_lite.parallel.payload import Payload, Wire, Wires


class CarryingStack(Stack):
    """Layers that hand on a state."""

    def run_state(self, state: State, run: Pass) -> State:
        """Run all layers, and the final norm if the stack ends here."""
        cached: dict[bool, KeysAndValues] = {}

        def through(layer: nn.Module, state: State) -> State:
            return run_layer(layer, state, run, cached)

        state = recompute.run_layers(list(self.layers), state, through, self.recompute)
        if self.last_norm is None:
            return state
        return state._replace(hidden=self.last_norm(state.hidden))


def run_layer(
    layer: nn.Module, state: State, run: Pass, cached: dict[bool, KeysAndValues]
) -> State:
    """Run one layer. cached: see Carried."""
    own, *later = state.inputs or (None,)
    carried = Carried(own, dict(state.kept), cached)
    hidden: Tensor = layer(state.hidden, replace(run, carried=carried))
    return State(hidden, tuple(later), carried.kept)


class CarryingChunk(ModelChunk):
    """One virtual stage of such a decoder."""

    def __init__(self, plan: Plan, chunk: Chunk) -> None:
        super().__init__(plan, chunk)
        self.first_layer = chunk.first_layer
        self.end = chunk.first_layer + chunk.layers

    def make_decoder(self, plan: Plan, chunk: Chunk) -> Stack:
        return CarryingStack(plan, own_layers(plan, chunk), ends=chunk.is_last)

    def takes(self, lengths: Lengths) -> Wires:
        return () if self.is_first else self._wires(lengths, self.first_layer)

    def gives(self, lengths: Lengths) -> Wires:
        return () if self.is_last else self._wires(lengths, self.end)

    def _wires(self, lengths: Lengths, layer: int) -> Wires:
        """Return the shapes of the state before a layer."""
        config = self.plan.config
        hidden = self.activations(lengths.rows, lengths.tokens)
        found = [hidden]
        left = config.layer_count - layer
        if config.has("layer_inputs") and left:
            here, rows, _ = hidden.shape
            found.append(Wire((here, rows, left, config.layer_inputs.width), hidden.dtype))
        for kind in kept_before(config, layer):
            source = self.plan.of_layer(sources(config)[kind])
            heads, width = source.sizes["kv_heads"], source.config.attention.head_dim
            kept = Wire((lengths.tokens, lengths.rows, heads, width), hidden.dtype)
            found += [kept, kept]
        return tuple(found)

    def begin(self, run: Pass) -> State:
        """Return the state before the first layer."""
        assert self.embedding is not None
        embedded: Tensor = self.embedding(run)
        inputs = () if self.layer_inputs is None else self.layer_inputs(run, embedded)
        return State(embedded, inputs, {})

    def forward(self, taken: Payload, run: Pass) -> Payload:
        """Run the stage. taken: the state before its first layer. See ModelChunk.forward."""
        assert isinstance(self.decoder, CarryingStack)
        state = self.begin(run) if self.is_first else self._received(taken)
        state = self.decoder.run_state(state, run)
        return (state.hidden,) if self.is_last else self._sent(state)

    def _received(self, taken: Payload) -> State:
        """Return the state that a payload holds, as _wires describes it."""
        config = self.plan.config
        hidden, *others = taken
        inputs: tuple[Tensor, ...] = ()
        if config.has("layer_inputs") and self.first_layer < config.layer_count:
            stacked, *others = others
            inputs = stacked.unbind(2)
        kinds = kept_before(config, self.first_layer)
        pairs = zip(others[::2], others[1::2], strict=True)
        kept = {kind: KeysAndValues(*pair) for kind, pair in zip(kinds, pairs, strict=True)}
        return State(hidden, inputs, kept)

    def _sent(self, state: State) -> Payload:
        """Return the payload of a state, as _wires describes it."""
        inputs = (torch.stack(state.inputs, 2),) if state.inputs else ()
        kinds = kept_before(self.plan.config, self.end)
        kept = (tensor for kind in kinds for tensor in state.kept[kind])
        return state.hidden, *inputs, *kept

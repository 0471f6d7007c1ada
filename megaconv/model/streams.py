"""The subjects of a model's description (described.py) about residual streams, and about embeddings that layers add to them.

All sizes are 0 in models with one stream and one embedding.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class LayerInputs:
    """A second embedding of the tokens, with a part for each layer, which the layer adds after its MLP (Gemma 3n). All
    sizes are 0 in models without it."""

    width: int = 0
    """Elements of one layer's part."""
    vocab: int = 0
    """Tokens that have such an embedding."""


@dataclass(frozen=True)
class Streams:
    """Several residual streams (AltUp, arXiv 2301.13310, as in Gemma 3n). A layer works on one of them, and predicts and
    corrects all others. All sizes are 0 in models with one stream."""

    count: int = 0
    active: int = 0
    """Number of the stream that layers work on."""
    scaled: bool = False
    """True if a vector scales this stream before a layer's part of the second embedding is multiplied with it."""
    laurel_rank: int = 0
    """Rank of a product of two matrices that is added beside attention (LAuReL, arXiv 2411.07501)."""


@dataclass(frozen=True)
class HyperConnections:
    """Several residual streams, which each attention and each MLP mixes (arXiv 2512.24880, as in DeepSeek V4). A learned
    sum of the streams is a sublayer's input, and its output is added to each stream by another weight. All numbers are 0
    in models with one stream."""

    streams: int = 0
    iterations: int = 0
    """Steps in which the matrix that mixes streams is divided by the sums of its rows and columns (Sinkhorn)."""
    epsilon: float = 0.0
    """A number that is added to these sums and to the weights."""
    mixes: bool = True
    """True if such a matrix mixes the streams. False if each stream stays what it was before a sublayer's output is added."""
    learned_head: bool = True
    """True if a learned sum of the streams follows the last layer. False: their mean."""
    magnitude: float = 2.0
    """The largest weight by which a sublayer's output is added."""
    rank: int = 0
    """Width between two matrices that give each element of each stream its weight, after a norm (Qwen4-Exp). No matrix
    then mixes the streams, and a norm of them takes the place of the norms before sublayers. 0 as in DeepSeek V4."""


@dataclass(frozen=True)
class NGrams:
    """Embeddings of n-grams in some layers (Qwen4-Exp): a hash of the last tokens chooses the rows of a table. All numbers
    are 0 in models without them."""

    size: int = 0
    """Tokens of the longest n-gram. There are also n-grams of each smaller number of tokens from two on."""
    heads: int = 0
    """Hashes of each n-gram. Each has a part of the table of its own."""
    width: int = 0
    """Elements of a token's embedding: all rows that its n-grams choose."""
    conv: int = 0
    """Width of the convolution over the embeddings, whose positions are `size` tokens apart."""
    vocab: int = 0
    """The least number of rows of one hash. Each hash has a prime number of rows that no other hash has."""
    multiple: int = 0
    """Rows of a layer's table are a multiple of this number."""
    seed: int = 0
    """The seed of the hashes."""
    parts: int = 0
    """Tensors that hold a layer's table in published files."""
    stored_parts: int | None = field(default=None, compare=False)
    """The same in the model's own files: 0 for one tensor with the name of transformers' class; None for `parts`.

    Configurations are compared without it and without the next field, since they have no effect.
    """
    stored_hashes: bool = field(default=False, compare=False)
    """True if files hold the numbers that the hashes multiply and divide by. These follow from the other fields."""


@dataclass(frozen=True)
class Loops:
    """Layers between others that run several times (Dory). Before each run, the normed output of the first layers is added
    to the normed hidden states. All numbers are 0 in models without them."""

    runs: int = 0
    before: int = 0
    """Layers before them, which run once."""
    after: int = 0
    """Layers after them."""
    caches_last: bool = False
    """True if earlier tokens are attended to as the last run left them. False: each run attends to its own."""


@dataclass(frozen=True)
class UnitStates:
    """A normalized transformer (nGPT, arXiv 2410.01131; Dory): hidden states, q and k, and the inputs of the last matrices
    of attention and MLPs have length 1. Hidden states move towards a sublayer's output by a stored rate of each element.
    Further stored numbers scale queries, the gate of attention, both parts of MLPs, and the logits of each token."""

    unit: float = 0.0
    """The stored number that stands for 1 in these rates and scales but those of MLPs; 0 in other models."""
    rate: float = 0.0
    """The rate for which this number stands."""


@dataclass(frozen=True)
class Recurrence:
    """Two stacks of equally many layers that take turns (HRM-Text). Both numbers are 0 in models without them."""

    high: int = 0
    """Runs of the high stack. It reads the sum of its own last output and that of the low stack."""
    low: int = 0
    """Runs of the low stack before each run of the high one."""

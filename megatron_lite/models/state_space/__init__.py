"""The mathematics of mixers with a state: pure functions, chunk by chunk. They know no layers and no parallelism.

Shapes in all files of this package:

    batch      rows, which don't see each other     heads      heads of the values, each with a state of its own
    tokens     tokens of a row                      key heads, groups     heads of queries and keys
    chunks     chunks of a row                      key, value, state, width     elements of one head
    chunk      tokens of a chunk                    t, s       two tokens of one chunk: t reads, s <= t has written

Names of factors:

    decay      logarithm: the sum over the tokens of a chunk, up to each token
    between    exp(decay[t] - decay[s]): what is left at token t of what token s has written
    into       what is left, at each token, of the state before the chunk
    out        what is left, at the end of the chunk, of what a token has written
    through    what is left, at the end of the chunk, of the state before it
"""

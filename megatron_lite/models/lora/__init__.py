"""LoRA: two small trained matrices added to a frozen matrix W: y = W x + scale · B (A x).

shares     the modules of transformers that a rank's matrix contains parts of
targets    the selection of modules by their names
parameters the names and shapes of A and B, and the ranks that share them
adapter    the computation of an adapter, and how tensor ranks shard it
dora       the computation of an adapter that trains lengths of rows too
attached   adds adapters to the selected matrices of a chunk
"""

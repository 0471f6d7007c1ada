"""LoRA: beside a frozen matrix W two thin ones that are trained, y = W x + scale · B (A x).

shares     which of transformers' modules a rank's matrix has a part of
adapter    what is computed beside a matrix, and how tensor ranks share it
attached   adapters beside all matrices of a chunk that are to have one
"""

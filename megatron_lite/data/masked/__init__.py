"""Samples for BERT and T5 as in megatron-core: sentences with masked words.

mapping    the sentences of a sample
masking    the masked tokens of a sample
samples    the inputs and labels of BERT and T5
"""

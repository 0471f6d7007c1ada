"""Samples for BERT and T5, those of megatron-core: sentences with words hidden.

mapping    which sentences make a sample
masking    which of a sample's tokens are hidden
samples    what BERT and T5 are shown, and what they are to say
"""

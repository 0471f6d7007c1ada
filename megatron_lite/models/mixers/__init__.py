"""Mixers: the parts of a layer that mix tokens. One file declares what all mixers have in common, one each computes."""

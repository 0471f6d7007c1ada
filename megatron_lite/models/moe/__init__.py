"""Mixtures of experts: routing, dispatch of tokens, computation of experts, and load balancing."""

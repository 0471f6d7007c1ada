"""Mixtures of experts: which experts a token goes to, how it gets there, what they make of it, how they are kept in balance."""

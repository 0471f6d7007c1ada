"""Signatures of models, as the OpenSSF's model signing defines them."""

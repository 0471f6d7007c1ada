"""A model that is computed without being in memory: each matrix is read from its checkpoint when it is used."""

"""The project directory of Retro: the chunk database, the neighbours and the samples."""

"""The computation of models: layers, attention, positions and loss."""

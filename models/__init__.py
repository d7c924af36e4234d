"""Model families and weight loading: ready-made `forward(params, batch, cache)` functions for the engine."""

from models.checkpoint import LoadError
from models.load import LoadedModel, load_model

__all__ = ["LoadError", "LoadedModel", "load_model"]

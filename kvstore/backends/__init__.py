"""Adapters to the media, one module or package each; found by name through :mod:`kvstore.registry`."""

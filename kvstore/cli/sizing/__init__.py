"""How many bytes the KV cache of a model has: the numbers behind ``kvstore size``."""

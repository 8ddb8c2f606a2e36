"""Conversion between text and token ids: tokenizers, chat templates, incremental decoding. Does not import torch."""

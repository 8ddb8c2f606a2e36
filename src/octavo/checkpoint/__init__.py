"""Locating and reading a model's files: configuration, headers and metadata. Does not import torch."""

"""Octavo serves large language models from paged key/value memory. Importing it loads no torch."""

__version__ = "0.1.0"

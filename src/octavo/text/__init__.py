"""Between text and token ids: tokenizers, chat templates, incremental decoding. Nothing here imports torch."""

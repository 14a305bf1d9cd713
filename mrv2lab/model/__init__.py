"""The decoder, its weights and its tokenizer, from a name, a folder, a GGUF file or a config (``load``)."""

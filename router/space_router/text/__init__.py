"""Text and token ids: tokenizer, incremental detokeniser, stop strings, chat templates, tool calls."""

"""Between text and token ids: tokenizer, incremental detokeniser, stop strings, chat templates."""

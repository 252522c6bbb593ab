"""Tool calls in generated text: formats, parsing, grammars."""

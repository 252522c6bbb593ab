"""Tool calls in a model's text: formats, parsing, grammars."""

"""The fields of `ServeConfig`, and how their text is parsed."""

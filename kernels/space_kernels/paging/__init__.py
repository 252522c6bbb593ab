"""Which rows a step has, and where their keys and values lie in the pages."""

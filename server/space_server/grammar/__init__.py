"""Grammars, compiled beside the steps, and the state of an output in one."""

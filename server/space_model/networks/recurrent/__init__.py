"""Recurrent layers of transformers' hybrids, on states that are kept between steps.

`attach` is the way in: while a step runs, the modules that mix tokens without attention compute with their own linears,
norms and weights, and with our convolution and recurrence. Outside a step (in the check at load) they are
transformers' own.
"""

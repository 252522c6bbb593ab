"""Attention of families whose modules compute it themselves instead of through transformers' AttentionInterface.

`attach` is the way in: it gives each attention module of such a family a forward, or a part of one, that calls our
paged attention with the module's own weights while a step runs. Outside a step (in the check at load) the module is
transformers' own.
"""

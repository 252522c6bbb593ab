"""One file per engine, and `conversation.py`, which runs one of them in an interpreter of its own.

The files are started by path, by a Python that may have nothing of this project; each imports its engine and no other.
"""

"""What runs an engine in an interpreter of its own: `converse.py`, and a file for each engine.

The files are started by path, by a Python that may know nothing of this project; they import the engine and no other.
"""

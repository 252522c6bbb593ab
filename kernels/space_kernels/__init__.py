"""The ops of a SPACE step: a reference torch definition of each, and faster implementations beside it."""

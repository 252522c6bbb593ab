"""Recurrent layers: their states between steps, and how the rows of a step advance them."""

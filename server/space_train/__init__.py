"""Training: SAR-SFT, the draft head, and the recipe of the embedded model."""

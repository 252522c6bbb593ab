"""The page at `/`: a prompt, and its tokens in the colours of the steps that gave them."""

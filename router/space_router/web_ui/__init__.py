"""The page at `/`: generates from a prompt and colours tokens by the step that produced them."""

"""What a step costs by what it lays out."""

"""Policy: which request runs when, and how tokens are chosen and committed (design: floor 6)."""

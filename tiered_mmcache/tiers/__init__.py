"""The tiers below the hot one, and how entries move between them."""

"""What happened, how often and why, and the forms in which it is told."""

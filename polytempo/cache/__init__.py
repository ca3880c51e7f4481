"""Per-row state: where it lives, and what one batch may see of it."""

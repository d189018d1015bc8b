"""Stores of a rank's live weights: prepare a version beside them, commit it in place, undo it."""

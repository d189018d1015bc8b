"""Verified weight synchronisation from RL trainers to LLM inference engines."""

"""Engines whose live weights follow a stream, one module each. Nothing is imported until one of them is asked for."""

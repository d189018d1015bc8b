"""A host agent: worker processes that hold the weights of a plain checkpoint and follow a stream, without an engine.

For hosts whose engine only reads files, and for tests: everything but generation is what an engine's plugin does.
"""

"""Adapters: what of an engine gpusync hooks into, one package for each engine. An engine is imported only when its
adapter is called."""

"""Device operations of gpusync: a numpy reference for each, and Triton behind the same functions."""

"""Decoding on a GPU. Everything here needs torch with CUDA, and is imported when a device was chosen."""

"""Enough of torchvision for sglang to be imported by a server of text models. Whatever is called raises."""

__version__ = "0.0.0"

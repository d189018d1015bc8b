"""The trainer's side: from the model that is trained to what `gpusync.Publisher` takes."""

from gpusync.trainers.tensors import named_tensors

__all__ = ["named_tensors"]

from . import functional
from .functional import InterpolationMode

__all__ = ["Compose", "InterpolationMode", "Normalize", "Resize", "ToPILImage", "ToTensor", "functional"]


class _Absent:
    def __init__(self, *_args, **_options):
        raise RuntimeError("torchvision is not installed here")


Normalize = Compose = Resize = ToTensor = Lambda = CenterCrop = ToPILImage = _Absent

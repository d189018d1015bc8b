from torchvision.transforms.functional import *  # noqa: F403

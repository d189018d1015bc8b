from ..functional import *  # noqa: F403

"""One computing thread: the models are too small for more, and the bits do not depend on it."""

import torch

torch.set_num_threads(1)

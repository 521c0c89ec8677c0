"""One computing thread, as the ranks have: sums over a batch depend on it."""

import torch

torch.set_num_threads(1)

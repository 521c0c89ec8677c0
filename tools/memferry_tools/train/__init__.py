"""``memferry train``: a language model trained through the runtime, and the same in plain PyTorch."""

"""Several GPUs of one host: links, whole iterations, and what the simulator says of them."""

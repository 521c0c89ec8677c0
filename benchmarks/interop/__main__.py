"""What sharing memory with other libraries costs: see `benchmarks.runner`."""

from .cases import BENCHMARK

BENCHMARK.main()

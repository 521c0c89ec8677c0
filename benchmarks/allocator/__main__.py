"""The allocator beside other allocators, in one run on one machine: see `benchmarks.runner`."""

from .cases import BENCHMARK

BENCHMARK.main()

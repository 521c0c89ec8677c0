"""Bridges to frameworks: each file needs its own, and `memferry_allocator` itself imports none of them."""

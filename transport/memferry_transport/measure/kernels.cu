// Kernels for measuring: copies by the multiprocessors, and a chase from pointer to pointer.

// Copies `count` units of 16 bytes.  Four loads of a thread are under way at a time.
extern "C" __global__ void __launch_bounds__(1024) copy_units(uint4* dst, const uint4* src, size_t count) {
  const size_t stride = (size_t)gridDim.x * blockDim.x;
  size_t at = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
  for (; at + 3 * stride < count; at += 4 * stride) {
    const uint4 a = src[at], b = src[at + stride], c = src[at + 2 * stride], d = src[at + 3 * stride];
    dst[at] = a;
    dst[at + stride] = b;
    dst[at + 2 * stride] = c;
    dst[at + 3 * stride] = d;
  }
  for (; at < count; at += stride) dst[at] = src[at];
}

// Follows `hops` pointers, each of which is known only once the one before has arrived.
extern "C" __global__ void chase(const volatile unsigned long long* first, size_t hops, unsigned long long* last) {
  unsigned long long at = (unsigned long long)first;
  for (size_t hop = 0; hop < hops; ++hop) at = *(const volatile unsigned long long*)at;
  *last = at;
}

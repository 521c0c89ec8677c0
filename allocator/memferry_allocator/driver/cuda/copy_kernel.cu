// A copy by the multiprocessors, between any pointers that the device reaches, of any alignment and length.

constexpr int DEPTH = 8;  // loads of a thread that are under way at a time: they hide what a link takes to answer

// Units that lie alike at both ends; the bytes before the first and behind the last are the last block's.
template <typename Unit>
__device__ void copy_by(char* dst, const char* src, size_t nbytes) {
  size_t head = (0 - (size_t)dst) % sizeof(Unit);
  if (head > nbytes) head = nbytes;
  const size_t count = (nbytes - head) / sizeof(Unit);
  if (blockIdx.x == gridDim.x - 1) {
    const size_t tail = head + count * sizeof(Unit) + threadIdx.x;
    if (threadIdx.x < head) dst[threadIdx.x] = src[threadIdx.x];
    if (tail < nbytes) dst[tail] = src[tail];
  }
  Unit* to = (Unit*)(dst + head);
  const Unit* of = (const Unit*)(src + head);
  const size_t tile = (size_t)blockDim.x * DEPTH;
  for (size_t first = tile * blockIdx.x; first < count; first += tile * gridDim.x) {
    const size_t at = first + threadIdx.x;
    Unit held[DEPTH];
    if (first + tile <= count) {
#pragma unroll
      for (int i = 0; i < DEPTH; ++i) held[i] = of[at + (size_t)i * blockDim.x];
#pragma unroll
      for (int i = 0; i < DEPTH; ++i) to[at + (size_t)i * blockDim.x] = held[i];
    } else {
#pragma unroll
      for (int i = 0; i < DEPTH; ++i)
        if (at + (size_t)i * blockDim.x < count) held[i] = of[at + (size_t)i * blockDim.x];
#pragma unroll
      for (int i = 0; i < DEPTH; ++i)
        if (at + (size_t)i * blockDim.x < count) to[at + (size_t)i * blockDim.x] = held[i];
    }
  }
}

extern "C" __global__ void __launch_bounds__(1024) memferry_copy(char* dst, const char* src, size_t nbytes) {
  const size_t apart = (size_t)dst ^ (size_t)src;
  if (apart % 16 == 0)
    copy_by<uint4>(dst, src, nbytes);
  else if (apart % 8 == 0)
    copy_by<uint2>(dst, src, nbytes);
  else if (apart % 4 == 0)
    copy_by<unsigned>(dst, src, nbytes);
  else if (apart % 2 == 0)
    copy_by<unsigned short>(dst, src, nbytes);
  else
    copy_by<unsigned char>(dst, src, nbytes);
}

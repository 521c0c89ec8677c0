// Runs the source of the device kernels on the CPU: a thread of the host for every thread of the device.
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#define __CUDACC_RTC__
#define __global__
#define __device__
#define __forceinline__ inline

struct dim {
    unsigned x;
};
struct float4 {
    float x, y, z, w;
};
struct ushort4 {
    unsigned short x, y, z, w;
};
struct uint4 {
    unsigned x, y, z, w;
};
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static ushort4 make_ushort4(unsigned short x, unsigned short y, unsigned short z, unsigned short w) {
    return {x, y, z, w};
}
static float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
static unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

static void __threadfence_system() {}

static thread_local dim blockIdx, threadIdx;
static dim blockDim, gridDim;

enum { WARP = 32 };
struct warp {
    std::barrier<> together{WARP};
    double lane[WARP];
};
static std::vector<std::unique_ptr<warp>> warps;  // of the block that runs

static double __shfl_down_sync(unsigned, double value, int delta, int width) {
    warp &mine = *warps[threadIdx.x / WARP];
    int lane = threadIdx.x % WARP;
    mine.lane[lane] = value;
    mine.together.arrive_and_wait();
    double got = lane % width + delta < width ? mine.lane[lane + delta] : value;
    mine.together.arrive_and_wait();
    return got;
}

template <typename Kernel> static void on_threads(int blocks, int threads, Kernel kernel) {
    gridDim.x = blocks;
    blockDim.x = threads;
    for (int block = 0; block < blocks; block++) {
        warps.clear();
        for (int number = 0; number < threads / WARP; number++) warps.push_back(std::make_unique<warp>());
        std::vector<std::thread> running;
        for (int number = 0; number < threads; number++)
            running.emplace_back([=] {
                blockIdx.x = block;
                threadIdx.x = number;
                kernel();
            });
        for (auto &thread : running) thread.join();
    }
}

#include "kernels.cu"

extern "C" void launch(const char *name, int blocks, int threads, void **a) {
    auto size = [a](int i) { return *(size_t *)a[i]; };
    auto number = [a](int i) { return *(int *)a[i]; };
    if (!std::strcmp(name, "memferry_adam_update"))
        on_threads(blocks, threads, [=] {
            memferry_adam_update(*(memferry_adam_operands *)a[0], *(memferry_adam *)a[1], size(2), size(3));
        });
    else if (!std::strcmp(name, "memferry_combine"))
        on_threads(blocks, threads, [=] {
            memferry_combine(size(0), number(1), size(2), number(3), size(4), number(5), size(6), size(7));
        });
    else if (!std::strcmp(name, "memferry_move"))
        on_threads(blocks, threads, [=] {
            memferry_move((uint4 *)size(0), number(1), (const uint4 *)size(2), number(3), number(4), number(5),
                          number(6));
        });
    else if (!std::strcmp(name, "memferry_seep"))
        on_threads(blocks, threads, [=] {
            memferry_seep((uint4 *)size(0), number(1), (const uint4 *)size(2), number(3), number(4), number(5),
                          number(6));
        });
    else if (!std::strcmp(name, "memferry_scatter_rows"))
        on_threads(blocks, threads, [=] {
            memferry_scatter_rows((uint4 *)size(0), (const long long *)size(1), (const uint4 *)size(2),
                                  (const unsigned char *)size(3), size(4), size(5));
        });
    else
        on_threads(blocks, threads, [=] { memferry_sums(size(0), number(1), size(2), (double *)size(3)); });
}

/* The kernels of the device.  The arithmetic is the C compilers' own source; here it is only spread over threads.
 *
 * Every pointer may be of device memory or of host memory mapped to the device.  Elements are handled in groups of
 * four, 16 bytes of fp32, from `head` on, where all pointers are aligned; what lies before and behind goes one by one.
 */
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long uintptr_t;

#include "adam.h"
#include "arithmetic.h"

#if defined(__CUDACC_VER_MAJOR__) && (__CUDACC_VER_MAJOR__ > 12 || __CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ >= 4)
#define FEW_REGISTERS __maxnreg__(32)
#else
#define FEW_REGISTERS
#endif

enum { GROUP = 4, NORM_BLOCK = 4096, NORM_LANES = 64, NORM_THREADS = 8, LANES_A_THREAD = NORM_LANES / NORM_THREADS };

typedef struct {
    float x[GROUP];
} group;

INLINE float load(uintptr_t base, int dtype, size_t i) {
    if (dtype == MEMFERRY_FLOAT32) return ((const float *)base)[i];
    uint16_t half = ((const uint16_t *)base)[i];
    return dtype == MEMFERRY_BFLOAT16 ? widen_bfloat16(half) : widen_float16(half);
}

INLINE uint16_t narrowed(float value, int dtype) {
    return dtype == MEMFERRY_BFLOAT16 ? narrow_bfloat16(value) : narrow_float16(value);
}

INLINE void store(uintptr_t base, int dtype, size_t i, float value) {
    if (dtype == MEMFERRY_FLOAT32) ((float *)base)[i] = value;
    else ((uint16_t *)base)[i] = narrowed(value, dtype);
}

INLINE group load_group(uintptr_t base, int dtype, size_t i) {
    if (dtype == MEMFERRY_FLOAT32) {
        float4 raw = *(const float4 *)((const float *)base + i);
        return {raw.x, raw.y, raw.z, raw.w};
    }
    ushort4 raw = *(const ushort4 *)((const uint16_t *)base + i);
    if (dtype == MEMFERRY_BFLOAT16)
        return {widen_bfloat16(raw.x), widen_bfloat16(raw.y), widen_bfloat16(raw.z), widen_bfloat16(raw.w)};
    return {widen_float16(raw.x), widen_float16(raw.y), widen_float16(raw.z), widen_float16(raw.w)};
}

INLINE void store_group(uintptr_t base, int dtype, size_t i, group g) {
    if (dtype == MEMFERRY_FLOAT32)
        *(float4 *)((float *)base + i) = make_float4(g.x[0], g.x[1], g.x[2], g.x[3]);
    else
        *(ushort4 *)((uint16_t *)base + i) = make_ushort4(narrowed(g.x[0], dtype), narrowed(g.x[1], dtype),
                                                          narrowed(g.x[2], dtype), narrowed(g.x[3], dtype));
}

INLINE size_t this_thread() { return (size_t)blockIdx.x * blockDim.x + threadIdx.x; }
INLINE size_t all_threads() { return (size_t)gridDim.x * blockDim.x; }

/* The k-th of the elements outside of the groups. */
INLINE size_t outside(size_t k, size_t head, size_t groups) { return k < head ? k : k + groups * GROUP; }

/* -- Adam -------------------------------------------------------------------------------------------------------- */

extern "C" __global__ void memferry_adam_update(memferry_adam_operands o, memferry_adam a, size_t head, size_t groups) {
    for (size_t n = this_thread(); n < groups; n += all_threads()) {
        size_t i = head + n * GROUP;
        group p = load_group(o.parameter, MEMFERRY_FLOAT32, i), m = load_group(o.exp_avg, MEMFERRY_FLOAT32, i);
        group v = load_group(o.exp_avg_sq, MEMFERRY_FLOAT32, i), g = load_group(o.gradient, o.gradient_dtype, i);
        for (int j = 0; j < GROUP; j++) {
            memferry_adam_state next = adam_element(p.x[j], g.x[j], m.x[j], v.x[j], &a, 0);
            p.x[j] = next.parameter;
            m.x[j] = next.exp_avg;
            v.x[j] = next.exp_avg_sq;
        }
        store_group(o.out_parameter, MEMFERRY_FLOAT32, i, p);
        store_group(o.out_exp_avg, MEMFERRY_FLOAT32, i, m);
        store_group(o.out_exp_avg_sq, MEMFERRY_FLOAT32, i, v);
        if (o.weight) store_group(o.weight, o.weight_dtype, i, p);
    }
    for (size_t k = this_thread(); k < o.count - groups * GROUP; k += all_threads()) {
        size_t i = outside(k, head, groups);
        memferry_adam_state next = adam_element(
            ((const float *)o.parameter)[i], load(o.gradient, o.gradient_dtype, i), ((const float *)o.exp_avg)[i],
            ((const float *)o.exp_avg_sq)[i], &a, i >= o.count - o.tail);
        ((float *)o.out_parameter)[i] = next.parameter;
        ((float *)o.out_exp_avg)[i] = next.exp_avg;
        ((float *)o.out_exp_avg_sq)[i] = next.exp_avg_sq;
        if (o.weight) store(o.weight, o.weight_dtype, i, next.parameter);
    }
}

/* -- sums and dtypes --------------------------------------------------------------------------------------------- */

/* target = source, or target + source, rounded to the target's dtype. */
extern "C" __global__ void memferry_combine(uintptr_t target, int target_dtype, uintptr_t source, int source_dtype,
                                            size_t count, int add, size_t head, size_t groups) {
    for (size_t n = this_thread(); n < groups; n += all_threads()) {
        size_t i = head + n * GROUP;
        group s = load_group(source, source_dtype, i);
        if (add) {
            group t = load_group(target, target_dtype, i);
            for (int j = 0; j < GROUP; j++) s.x[j] = t.x[j] + s.x[j];
        }
        store_group(target, target_dtype, i, s);
    }
    for (size_t k = this_thread(); k < count - groups * GROUP; k += all_threads()) {
        size_t i = outside(k, head, groups);
        float s = load(source, source_dtype, i);
        store(target, target_dtype, i, add ? load(target, target_dtype, i) + s : s);
    }
}

/* -- the norm ---------------------------------------------------------------------------------------------------- */

/* Adds the upper half of the lanes to the lower until one is left; a thread has LANES_A_THREAD neighbours of them. */
INLINE double across(double *lanes) {
    for (int width = NORM_THREADS / 2; width > 0; width /= 2)
        for (int j = 0; j < LANES_A_THREAD; j++)
            lanes[j] += __shfl_down_sync(0xffffffffu, lanes[j], width, NORM_THREADS);
    for (int width = LANES_A_THREAD / 2; width > 0; width /= 2)
        for (int j = 0; j < width; j++) lanes[j] += lanes[j + width];
    return lanes[0];
}

/* LANES_A_THREAD values from `i` on, widened; 0 for those that are not there. */
INLINE void load_lanes(float *x, uintptr_t values, int dtype, size_t count, size_t i) {
    size_t itemsize = dtype == MEMFERRY_FLOAT32 ? 4 : 2;
    if (i + LANES_A_THREAD <= count && values % (GROUP * itemsize) == 0) {
        for (int j = 0; j < LANES_A_THREAD; j += GROUP) {
            group g = load_group(values, dtype, i + j);
            for (int k = 0; k < GROUP; k++) x[j + k] = g.x[k];
        }
    } else {
        for (int j = 0; j < LANES_A_THREAD; j++) x[j] = i + j < count ? load(values, dtype, i + j) : 0.0f;
    }
}

/* The sums of NORM_BLOCK values each: of squares of fp32 or a half, or (dtype -1) of fp64 sums. */
extern "C" __global__ void memferry_sums(uintptr_t values, int dtype, size_t count, double *sums) {
    size_t blocks = (count + NORM_BLOCK - 1) / NORM_BLOCK;
    size_t rounded = (blocks + 31) / 32 * 32; /* so that the threads of a warp stay together */
    size_t part = this_thread() % NORM_THREADS;
    for (size_t block = this_thread() / NORM_THREADS; block < rounded; block += all_threads() / NORM_THREADS) {
        double lanes[LANES_A_THREAD] = {0};
        for (size_t row = 0; row < NORM_BLOCK / NORM_LANES; row++) {
            size_t first = block * NORM_BLOCK + row * NORM_LANES + part * LANES_A_THREAD;
            if (first >= count) break;
            if (dtype < 0) {
                for (int j = 0; j < LANES_A_THREAD && first + j < count; j++)
                    lanes[j] += ((const double *)values)[first + j];
            } else {
                float x[LANES_A_THREAD];
                load_lanes(x, values, dtype, count, first);
                for (int j = 0; j < LANES_A_THREAD; j++) lanes[j] += (double)x[j] * x[j];
            }
        }
        double sum = across(lanes);
        if (part == 0 && block < blocks) sums[block] = sum;
    }
}

/* -- moving bytes between device and host memory ------------------------------------------------------------------ */

/* Where a thread is in rows of `width` units of 16 bytes: as it goes on by `stride` units nothing is divided. */
typedef struct {
    unsigned row, column;
} cell;

INLINE cell cell_at(unsigned i, unsigned width) { return {i / width, i % width}; }

INLINE cell onwards(cell at, cell by, unsigned width) {
    at.row += by.row;
    at.column += by.column;
    if (at.column >= width) {
        at.column -= width;
        at.row++;
    }
    return at;
}

/* Rows of `width` units, which begin every so many units; a thread has `ahead` loads under way before it stores.
 * With `settle` what it has stored is in place before it loads more, so that no more than that is on the link. */
template <int ahead>
__device__ __forceinline__ void move_rows(uint4 *target, unsigned target_pitch, const uint4 *source,
                                          unsigned source_pitch, unsigned width, unsigned count, int settle) {
    unsigned first = (unsigned)this_thread(), stride = (unsigned)all_threads();
    if (first >= count) return;
    unsigned left = (count - first - 1) / stride + 1; /* units of this thread; no index here can wrap around */
    cell at = cell_at(first, width), by = cell_at(stride, width), from = at;
    for (; left >= ahead; left -= ahead) {
        uint4 held[ahead];
#pragma unroll
        for (int j = 0; j < ahead; j++) {
            held[j] = source[(size_t)at.row * source_pitch + at.column];
            at = onwards(at, by, width);
        }
#pragma unroll
        for (int j = 0; j < ahead; j++) {
            target[(size_t)from.row * target_pitch + from.column] = held[j];
            from = onwards(from, by, width);
        }
        if (settle) __threadfence_system();
    }
    for (; left > 0; left--) {
        target[(size_t)at.row * target_pitch + at.column] = source[(size_t)at.row * source_pitch + at.column];
        at = onwards(at, by, width);
    }
}

/* A few large blocks keep the link busy: each has a multiprocessor for itself. */
enum { AHEAD = 8 };
extern "C" __global__ void memferry_move(uint4 *target, unsigned target_pitch, const uint4 *source,
                                         unsigned source_pitch, unsigned width, unsigned count, int settle) {
    move_rows<AHEAD>(target, target_pitch, source, source_pitch, width, count, settle);
}

/* Blocks of one warp and 1024 registers, which are to find room beside a matrix product's blocks. */
extern "C" __global__ void FEW_REGISTERS memferry_seep(uint4 *target, unsigned target_pitch, const uint4 *source,
                                                       unsigned source_pitch, unsigned width, unsigned count,
                                                       int settle) {
    move_rows<2>(target, target_pitch, source, source_pitch, width, count, settle);
}

/* target[rows[r]] = values[r], or zeros without values; rows whose `skip` is not 0 are left out.  `width` in units. */
extern "C" __global__ void memferry_scatter_rows(uint4 *target, const long long *rows, const uint4 *values,
                                                 const unsigned char *skip, size_t width, size_t count) {
    size_t units = width * count, stride = all_threads();
    for (size_t first = this_thread(); first < units; first += stride * AHEAD) {
        uint4 held[AHEAD];
        size_t place[AHEAD];
        for (int j = 0; j < AHEAD; j++) {
            size_t i = first + j * stride, r = (unsigned)i / (unsigned)width;
            place[j] = (size_t)-1;
            if (i >= units || (skip && skip[r])) continue;
            place[j] = (size_t)rows[r] * width + (i - r * width);
            held[j] = values ? values[i] : make_uint4(0, 0, 0, 0);
        }
        for (int j = 0; j < AHEAD; j++)
            if (place[j] != (size_t)-1) target[place[j]] = held[j];
    }
}

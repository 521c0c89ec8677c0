/* What else happens to gradients on the CPU: the norm's sums of squares, accumulation, change of dtype. */
#include "variants.h"

enum { LANES = MEMFERRY_NORM_LANES };

/* Lane j has summed every LANES-th element from j on; the lanes then pair up, the lower with the upper half. */
INLINE double across(double *lanes) {
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int j = 0; j < width; j++) lanes[j] += lanes[j + width];
    return lanes[0];
}

INLINE double square_sum(const float *restrict values, size_t count) {
    double lanes[LANES] = {0};
    size_t i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int j = 0; j < LANES; j++) lanes[j] += (double)values[i + j] * values[i + j];
    for (size_t j = 0; i + j < count; j++) lanes[j] += (double)values[i + j] * values[i + j];
    return across(lanes);
}

INLINE void squares(const memferry_squares_call *call) {
    float wide[MEMFERRY_NORM_BLOCK];
    for (size_t start = 0; start < call->count; start += MEMFERRY_NORM_BLOCK) {
        size_t count = smaller(MEMFERRY_NORM_BLOCK, call->count - start);
        widen(wide, call->values, call->dtype, start, count);
        call->sums[start / MEMFERRY_NORM_BLOCK] = square_sum(wide, count);
    }
}

double memferry_reduce(double *sums, size_t count) {
    if (count == 0) return 0.0;
    while (count > 1) {
        for (size_t start = 0; start < count; start += MEMFERRY_NORM_BLOCK) {
            double lanes[LANES] = {0};
            size_t end = smaller(start + MEMFERRY_NORM_BLOCK, count);
            for (size_t i = start; i < end; i++) lanes[(i - start) % LANES] += sums[i];
            sums[start / MEMFERRY_NORM_BLOCK] = across(lanes);
        }
        count = (count + MEMFERRY_NORM_BLOCK - 1) / MEMFERRY_NORM_BLOCK;
    }
    return sums[0];
}

enum { PART = 1024 };

INLINE void add(const memferry_add_call *call) {
    float target[PART], source[PART];
    for (size_t start = 0; start < call->count; start += PART) {
        size_t count = smaller(PART, call->count - start);
        widen(target, call->target, call->target_dtype, start, count);
        widen(source, call->source, call->source_dtype, start, count);
        for (size_t i = 0; i < count; i++) target[i] += source[i];
        narrow(call->target, call->target_dtype, start, target, count);
    }
}

INLINE void convert(const memferry_convert_call *call) {
    float wide[PART];
    for (size_t start = 0; start < call->count; start += PART) {
        size_t count = smaller(PART, call->count - start);
        widen(wide, call->source, call->source_dtype, start, count);
        narrow(call->target, call->target_dtype, start, wide, count);
    }
}

VARIANTS(memferry_squares, memferry_squares_call, squares)
VARIANTS(memferry_add, memferry_add_call, add)
VARIANTS(memferry_convert, memferry_convert_call, convert)

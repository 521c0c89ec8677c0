/* Adam and AdamW on the CPU: one pass over weights, moments, gradient in and rounded weight out.
 *
 * The arithmetic is that of torch.optim.AdamW(fused=True) on the CPU, to the bit: IEEE fp32, rounded to nearest, with
 * fused multiply-adds exactly where fmaf stands and nowhere else.  Compile with -ffp-contract=off.  Every variant gives
 * the same bits; only its speed differs.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "adam.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define X86_VARIANTS 1
#endif

enum { BLOCK = 1024 }; /* elements widened at a time: 4 KiB that stay in the first-level cache */

#define INLINE static inline __attribute__((always_inline))

INLINE float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint32_t to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE float widen_bfloat16(uint16_t half) { return from_bits((uint32_t)half << 16); }

/* Round to nearest, ties to even; a NaN becomes the one NaN that torch makes of it. */
INLINE uint16_t narrow_bfloat16(float value) {
    uint32_t bits = to_bits(value);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : (uint16_t)rounded;
}

/* Exact, subnormals too: the product shifts the exponent by what the formats differ. */
INLINE float widen_float16(uint16_t half) {
    uint32_t bits = (uint32_t)(half & 0x7fffu) << 13;
    float magnitude = bits < 0x0f800000u ? from_bits(bits) * 0x1p112f : from_bits(bits | 0x7f800000u);
    return from_bits(to_bits(magnitude) | (uint32_t)(half & 0x8000u) << 16);
}

/* Round to nearest, ties to even; beyond the largest to infinity. */
INLINE uint16_t narrow_float16(float value) {
    uint32_t sign = to_bits(value) >> 16 & 0x8000u, bits = to_bits(value) & 0x7fffffffu;
    uint32_t normal = (bits - 0x38000000u + 0x0fffu + (bits >> 13 & 1u)) >> 13;
    uint32_t subnormal = to_bits(from_bits(bits) + 0.5f) - 0x3f000000u; /* the sum rounds to multiples of 2^-24 */
    uint32_t finite = bits < 0x38800000u ? subnormal : normal;
    uint32_t special = bits > 0x7f800000u ? 0x7e00u : 0x7c00u;
    return (uint16_t)(sign | (bits < 0x477ff000u ? finite : special));
}

INLINE void widen(float *restrict out, const void *gradient, int dtype, size_t start, size_t count, float scale) {
    const uint16_t *restrict half = (const uint16_t *)gradient + start;
    if (dtype == MEMFERRY_BFLOAT16) {
        for (size_t i = 0; i < count; i++) out[i] = widen_bfloat16(half[i]);
    } else if (dtype == MEMFERRY_FLOAT16) {
        for (size_t i = 0; i < count; i++) out[i] = widen_float16(half[i]);
    } else {
        memcpy(out, (const float *)gradient + start, count * sizeof *out);
    }
    if (scale != 1.0f)
        for (size_t i = 0; i < count; i++) out[i] *= scale;
}

INLINE void narrow(void *weight, int dtype, size_t start, const float *restrict value, size_t count) {
    uint16_t *restrict half = (uint16_t *)weight + start;
    if (dtype == MEMFERRY_FLOAT16)
        for (size_t i = 0; i < count; i++) half[i] = narrow_float16(value[i]);
    else
        for (size_t i = 0; i < count; i++) half[i] = narrow_bfloat16(value[i]);
}

/* Outputs may be the inputs: element i is read before it is written, and nothing else of it is. */
INLINE void update(const float *p, const float *g, const float *m, const float *v, float *out_p, float *out_m,
                   float *out_v, size_t count, const memferry_adam *settings) {
    const memferry_adam a[1] = {*settings};
#pragma GCC ivdep
    for (size_t i = 0; i < count; i++) {
        float gradient = a->maximize ? -g[i] : g[i];
        float weight = p[i];
        if (a->l2_decay != 0.0f) gradient = fmaf(weight, a->l2_decay, gradient);
        weight *= a->keep;
        float start = a->lerp_from_gradient ? gradient : m[i];
        float mean = fmaf(a->mean_weight, gradient - m[i], start);
        float square = fmaf(a->square_weight * gradient, gradient, v[i] * a->square_keep);
        float divisor = sqrtf(square) / a->square_correction + a->eps;
        out_p[i] = weight + (a->minus_step * mean) / divisor;
        out_m[i] = mean;
        out_v[i] = square;
    }
}

INLINE void run(const memferry_adam_operands *o, size_t count, const memferry_adam *a) {
    float wide[BLOCK];
    for (size_t start = 0; start < count; start += BLOCK) {
        size_t n = count - start < BLOCK ? count - start : BLOCK;
        float *out = o->out_parameter + start;
        widen(wide, o->gradient, o->gradient_dtype, start, n, a->scale);
        update(o->parameter + start, wide, o->exp_avg + start, o->exp_avg_sq + start, out, o->out_exp_avg + start,
               o->out_exp_avg_sq + start, n, a);
        if (o->weight) narrow(o->weight, o->weight_dtype, start, out, n);
    }
}

#define VARIANT(name, attributes)                                                                      \
    attributes static void name(const memferry_adam_operands *o, size_t count, const memferry_adam *a) { \
        run(o, count, a);                                                                              \
    }

VARIANT(run_generic, )
#ifdef X86_VARIANTS
VARIANT(run_avx2, __attribute__((target("avx2,fma"))))
VARIANT(run_avx512, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"))))
#endif

int memferry_adam_best_variant(void) {
#ifdef X86_VARIANTS
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return MEMFERRY_AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return MEMFERRY_AVX2;
#endif
    return MEMFERRY_GENERIC;
}

void memferry_adam_update(int variant, const memferry_adam_operands *o, size_t count, const memferry_adam *a) {
    switch (variant) {
#ifdef X86_VARIANTS
    case MEMFERRY_AVX512: run_avx512(o, count, a); return;
    case MEMFERRY_AVX2: run_avx2(o, count, a); return;
#endif
    default: run_generic(o, count, a);
    }
}

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

INLINE void widen(float *restrict out, const void *gradient, int dtype, size_t start, size_t count, float scale) {
    if (dtype == MEMFERRY_BFLOAT16) {
        const uint16_t *restrict half = (const uint16_t *)gradient + start;
        for (size_t i = 0; i < count; i++) out[i] = widen_bfloat16(half[i]);
    } else {
        memcpy(out, (const float *)gradient + start, count * sizeof *out);
    }
    if (scale != 1.0f)
        for (size_t i = 0; i < count; i++) out[i] *= scale;
}

INLINE void update(float *restrict p, const float *restrict g, float *restrict m, float *restrict v, size_t count,
                   const memferry_adam *restrict a) {
    for (size_t i = 0; i < count; i++) {
        float gradient = a->maximize ? -g[i] : g[i];
        float weight = p[i];
        if (a->l2_decay != 0.0f) gradient = fmaf(weight, a->l2_decay, gradient);
        weight *= a->keep;
        float start = a->lerp_from_gradient ? gradient : m[i];
        float mean = fmaf(a->mean_weight, gradient - m[i], start);
        float square = fmaf(a->square_weight * gradient, gradient, v[i] * a->square_keep);
        float divisor = sqrtf(square) / a->square_correction + a->eps;
        p[i] = weight + (a->minus_step * mean) / divisor;
        m[i] = mean;
        v[i] = square;
    }
}

INLINE void run(float *p, const void *gradient, int gradient_dtype, float *m, float *v, void *weight, size_t count,
                const memferry_adam *a) {
    float wide[BLOCK];
    for (size_t start = 0; start < count; start += BLOCK) {
        size_t n = count - start < BLOCK ? count - start : BLOCK;
        widen(wide, gradient, gradient_dtype, start, n, a->scale);
        update(p + start, wide, m + start, v + start, n, a);
        if (weight) {
            uint16_t *restrict out = (uint16_t *)weight + start;
            for (size_t i = 0; i < n; i++) out[i] = narrow_bfloat16(p[start + i]);
        }
    }
}

#define VARIANT(name, attributes)                                                                                  \
    attributes static void name(float *p, const void *gradient, int gradient_dtype, float *m, float *v,           \
                                void *weight, size_t count, const memferry_adam *a) {                             \
        run(p, gradient, gradient_dtype, m, v, weight, count, a);                                                 \
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

void memferry_adam_update(int variant, float *p, const void *gradient, int gradient_dtype, float *m, float *v,
                          void *weight, size_t count, const memferry_adam *a) {
    switch (variant) {
#ifdef X86_VARIANTS
    case MEMFERRY_AVX512: run_avx512(p, gradient, gradient_dtype, m, v, weight, count, a); return;
    case MEMFERRY_AVX2: run_avx2(p, gradient, gradient_dtype, m, v, weight, count, a); return;
#endif
    default: run_generic(p, gradient, gradient_dtype, m, v, weight, count, a);
    }
}

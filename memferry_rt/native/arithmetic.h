/* The arithmetic of the update, element by element: one source for the C compilers and for NVRTC.
 *
 * docs/numerics.md specifies it.  IEEE fp32 rounded to nearest, a fused multiply-add exactly where fmaf stands and
 * nowhere else, subnormals kept.  Compile with contraction off; NVRTC with precise division and root, too.
 */
#ifdef __CUDACC_RTC__
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
#define INLINE static __device__ __forceinline__
INLINE float from_bits(uint32_t bits) { return __uint_as_float(bits); }
INLINE uint32_t to_bits(float value) { return __float_as_uint(value); }
#else
#include <math.h>
#include <stdint.h>
#include <string.h>
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
#endif

/* -- formats: widening is exact, narrowing rounds to nearest, ties to even; a NaN narrows to one NaN ------------- */

INLINE float widen_bfloat16(uint16_t half) { return from_bits((uint32_t)half << 16); }

INLINE uint16_t narrow_bfloat16(float value) {
    uint32_t bits = to_bits(value);
    uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

/* The product moves the exponent by what the formats differ, and makes subnormals normal. */
INLINE float widen_float16(uint16_t half) {
    uint32_t bits = (uint32_t)(half & 0x7fffu) << 13;
    float magnitude = bits < 0x0f800000u ? from_bits(bits) * 0x1p112f : from_bits(bits | 0x7f800000u);
    return from_bits(to_bits(magnitude) | (uint32_t)(half & 0x8000u) << 16);
}

INLINE uint16_t narrow_float16(float value) {
    uint32_t sign = to_bits(value) >> 16 & 0x8000u, bits = to_bits(value) & 0x7fffffffu;
    uint32_t normal = (bits - 0x38000000u + 0x0fffu + (bits >> 13 & 1u)) >> 13;
    uint32_t subnormal = to_bits(from_bits(bits) + 0.5f) - 0x3f000000u; /* the sum rounds to multiples of 2^-24 */
    uint32_t finite = bits < 0x38800000u ? subnormal : normal;
    uint32_t number = sign | (bits < 0x477ff000u ? finite : 0x7c00u);
    return (uint16_t)(bits > 0x7f800000u ? 0x7e00u : number);
}

/* -- Adam -------------------------------------------------------------------------------------------------------- */

typedef struct {
    float parameter, exp_avg, exp_avg_sq;
} memferry_adam_state;

/* One element; `tail` where PyTorch updates it outside of its vector loop, and rounds another product. */
INLINE memferry_adam_state adam_element(float parameter, float gradient, float exp_avg, float exp_avg_sq,
                                        const memferry_adam *a, int tail) {
    memferry_adam_state next;
    gradient *= a->gradient_factor;
    if (a->l2_decay != 0.0f) gradient = fmaf(parameter, a->l2_decay, gradient);
    float start = a->lerp_from_gradient ? gradient : exp_avg;
    next.exp_avg = fmaf(tail ? a->tail_mean_weight : a->mean_weight, gradient - exp_avg, start);
    float weighted = a->square_weight * gradient;
    next.exp_avg_sq = tail ? fmaf(exp_avg_sq, a->square_keep, weighted * gradient)
                           : fmaf(weighted, gradient, exp_avg_sq * a->square_keep);
    float divisor = sqrtf(next.exp_avg_sq) / a->square_correction + a->eps;
    next.parameter = parameter * a->keep + (a->minus_step * next.exp_avg) / divisor;
    return next;
}

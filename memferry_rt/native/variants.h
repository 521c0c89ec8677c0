/* One source, compiled for several instruction sets; which one runs is chosen for the processor at hand. */
#include <fenv.h>
#include <stddef.h>
#include <stdint.h>

#include "adam.h"
#include "one_state.h"
#include "kernels.h"

#include "arithmetic.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define X86_VARIANTS 1
#define AVX2 __attribute__((target("avx2,fma")))
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#endif

/* Iterations do not depend on one another, also where an output is the input it belongs to. */
#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

/* Defines `name(call)`, which runs `body(call)` in the call's variant and in the arithmetic that C starts with:
 * whoever calls may have set another rounding or the flushing of subnormals. */
#ifdef X86_VARIANTS
#define VARIANTS(name, type, body)                                                 \
    static void body##_generic(const type *call) { body(call); }                   \
    AVX2 static void body##_avx2(const type *call) { body(call); }                 \
    AVX512 static void body##_avx512(const type *call) { body(call); }             \
    void name(const type *call) {                                                  \
        fenv_t before;                                                             \
        fegetenv(&before);                                                         \
        fesetenv(FE_DFL_ENV);                                                      \
        if (call->variant == MEMFERRY_AVX512) body##_avx512(call);                 \
        else if (call->variant == MEMFERRY_AVX2) body##_avx2(call);                \
        else body##_generic(call);                                                 \
        fesetenv(&before);                                                         \
    }
#else
#define VARIANTS(name, type, body)  \
    void name(const type *call) {   \
        fenv_t before;              \
        fegetenv(&before);          \
        fesetenv(FE_DFL_ENV);       \
        body(call);                 \
        fesetenv(&before);          \
    }
#endif

INLINE size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

/* Elements from `start` of an array of any dtype as fp32. */
INLINE void widen(float *restrict out, uintptr_t values, int dtype, size_t start, size_t count) {
    const uint16_t *restrict half = (const uint16_t *)values + start;
    if (dtype == MEMFERRY_BFLOAT16) {
        for (size_t i = 0; i < count; i++) out[i] = widen_bfloat16(half[i]);
    } else if (dtype == MEMFERRY_FLOAT16) {
        for (size_t i = 0; i < count; i++) out[i] = widen_float16(half[i]);
    } else {
        memcpy(out, (const float *)values + start, count * sizeof *out);
    }
}

/* fp32 into elements from `start` of an array of any dtype. */
INLINE void narrow(uintptr_t out, int dtype, size_t start, const float *restrict values, size_t count) {
    uint16_t *restrict half = (uint16_t *)out + start;
    if (dtype == MEMFERRY_BFLOAT16) {
        for (size_t i = 0; i < count; i++) half[i] = narrow_bfloat16(values[i]);
    } else if (dtype == MEMFERRY_FLOAT16) {
        for (size_t i = 0; i < count; i++) half[i] = narrow_float16(values[i]);
    } else {
        memcpy((float *)out + start, values, count * sizeof *values);
    }
}

#include "variants.h"

int memferry_best_variant(void) {
#ifdef X86_VARIANTS
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return MEMFERRY_AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return MEMFERRY_AVX2;
#endif
    return MEMFERRY_GENERIC;
}

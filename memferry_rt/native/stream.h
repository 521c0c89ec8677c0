/* Stores that bypass the cache: a line that is written whole need not be read first. */
#if defined(__x86_64__) && defined(__GNUC__)
#include <emmintrin.h>

/* Copies out of cache; what is not on whole 16 bytes of the target goes the common way. */
INLINE void stream_out(void *target, const void *source, size_t nbytes) {
    char *out = target;
    const char *in = source;
    size_t head = smaller(-(uintptr_t)target % 16, nbytes);
    memcpy(out, in, head);
    size_t i = head;
    for (; i + 16 <= nbytes; i += 16) _mm_stream_si128((__m128i *)(out + i), _mm_loadu_si128((const __m128i *)(in + i)));
    memcpy(out + i, in + i, nbytes - i);
}

/* Orders streamed stores before whatever tells others of them. */
INLINE void stream_fence(void) { _mm_sfence(); }
#else
INLINE void stream_out(void *target, const void *source, size_t nbytes) { memcpy(target, source, nbytes); }
INLINE void stream_fence(void) {}
#endif

/* How kernels go through memory, a block at a time: gradient widened, state updated, new weight rounded. */
#include "variants.h"
#include "stream.h"

/* Where a block of new state is made: at its place, or in cache, to be streamed out from there. */
typedef struct {
    float *place, *made;
} target;

INLINE target target_of(uintptr_t out, uintptr_t in, size_t start, float *scratch, int stream) {
    target t;
    t.place = (float *)out + start;
    t.made = stream && out != in ? scratch : t.place;
    return t;
}

INLINE void leave(target t, size_t count) {
    if (t.made != t.place) stream_out(t.place, t.made, count * sizeof *t.made);
}

/* The new weights of a block, where there are any. */
INLINE void round_out(uintptr_t weight, int dtype, size_t start, const float *made, size_t count,
                      const memferry_tuning *tuning) {
    _Alignas(64) uint16_t rounded[MEMFERRY_BLOCK];
    if (weight && tuning->stream_weight && dtype != MEMFERRY_FLOAT32) {
        narrow((uintptr_t)rounded, dtype, 0, made, count);
        stream_out((uint16_t *)weight + start, rounded, count * sizeof *rounded);
    } else if (weight) {
        narrow(weight, dtype, start, made, count);
    }
}

/* A parameter and what there is beside it, if anything. */
typedef struct {
    float parameter, state;
} one_state;

/* Defines `name(call)` for an optimizer with at most one state: `element(p, g, s, settings)` gives the new ones.
 * Outputs may be the inputs: element i is read before it is written. */
#define ONE_STATE(name, settings_type, element)                                                               \
    INLINE void name##_block(const memferry_one_state_call *call, size_t start, size_t count) {               \
        const memferry_one_state_operands *o = &call->operands;                                               \
        const memferry_tuning *t = call->tuning;                                                              \
        _Alignas(64) float gradient[MEMFERRY_BLOCK], scratch[2][MEMFERRY_BLOCK];                              \
        target p = target_of(o->out_parameter, o->parameter, start, scratch[0], t->stream_out);               \
        target s = target_of(o->out_state, o->state, start, scratch[1], t->stream_out);                       \
        const float *old_p = (const float *)o->parameter + start, *old_s = (const float *)o->state + start;   \
        if (!o->state) {                                                                                      \
            memset(scratch[1], 0, count * sizeof *scratch[1]);                                                \
            old_s = s.place = s.made = scratch[1];                                                            \
        }                                                                                                     \
        widen(gradient, o->gradient, o->gradient_dtype, start, count);                                        \
        const settings_type a = *(const settings_type *)call->settings; /* no store can change a copy */      \
        float *new_p = p.made, *new_s = s.made;                                                               \
        INDEPENDENT                                                                                           \
        for (size_t i = 0; i < count; i++) {                                                                  \
            one_state next = element(old_p[i], gradient[i] * a.gradient_factor, old_s[i], &a);                \
            new_p[i] = next.parameter;                                                                        \
            new_s[i] = next.state;                                                                            \
        }                                                                                                     \
        round_out(o->weight, o->weight_dtype, start, new_p, count, t);                                        \
        leave(p, count);                                                                                      \
        leave(s, count);                                                                                      \
    }                                                                                                         \
    INLINE void name(const memferry_one_state_call *call) {                                                   \
        size_t count = call->operands.count, block = smaller(call->tuning->block, MEMFERRY_BLOCK);            \
        for (size_t start = 0; start < count; start += block)                                                 \
            name##_block(call, start, smaller(block, count - start));                                         \
        stream_fence();                                                                                       \
    }                                                                                                         \
    VARIANTS(memferry_##name##_update, memferry_one_state_call, name)

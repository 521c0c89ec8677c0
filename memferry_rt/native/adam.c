/* Adam and AdamW on the CPU: one pass over state, gradient in and rounded weight out. */
#include "blocks.h"

/* Outputs may be the inputs: element i is read before it is written. */
INLINE void update(const float *p, const float *m, const float *v, const float *restrict gradient, float *out_p,
                   float *out_m, float *out_v, size_t count, const memferry_adam *settings, int tail) {
    const memferry_adam a = *settings; /* a copy that no store can change, so that it stays in registers */
    INDEPENDENT
    for (size_t i = 0; i < count; i++) {
        memferry_adam_state next = adam_element(p[i], gradient[i], m[i], v[i], &a, tail);
        out_p[i] = next.parameter;
        out_m[i] = next.exp_avg;
        out_v[i] = next.exp_avg_sq;
    }
}

/* The loads and stores of an update and nothing else; the xor is there to use the gradient. */
INLINE void carry(const float *p, const float *m, const float *v, const float *restrict gradient, float *out_p,
                  float *out_m, float *out_v, size_t count) {
    INDEPENDENT
    for (size_t i = 0; i < count; i++) {
        out_p[i] = p[i];
        out_m[i] = m[i];
        out_v[i] = from_bits(to_bits(v[i]) ^ to_bits(gradient[i]));
    }
}

enum work { BODY, TAIL, TRAFFIC };

INLINE void adam_block(const memferry_adam_call *call, size_t start, size_t count, enum work work) {
    const memferry_adam_operands *o = &call->operands;
    const memferry_tuning *t = call->tuning;
    _Alignas(64) float gradient[MEMFERRY_BLOCK], scratch[3][MEMFERRY_BLOCK];
    target p = target_of(o->out_parameter, o->parameter, start, scratch[0], t->stream_out);
    target m = target_of(o->out_exp_avg, o->exp_avg, start, scratch[1], t->stream_out);
    target v = target_of(o->out_exp_avg_sq, o->exp_avg_sq, start, scratch[2], t->stream_out);
    widen(gradient, o->gradient, o->gradient_dtype, start, count);
    const float *old_p = (const float *)o->parameter + start, *old_m = (const float *)o->exp_avg + start;
    const float *old_v = (const float *)o->exp_avg_sq + start;
    if (work == TRAFFIC)
        carry(old_p, old_m, old_v, gradient, p.made, m.made, v.made, count);
    else
        update(old_p, old_m, old_v, gradient, p.made, m.made, v.made, count, call->settings, work == TAIL);
    round_out(o->weight, o->weight_dtype, start, p.made, count, t);
    leave(p, count);
    leave(m, count);
    leave(v, count);
}

INLINE void blocks(const memferry_adam_call *call, size_t start, size_t end, enum work work) {
    size_t block = smaller(call->tuning->block, MEMFERRY_BLOCK);
    for (; start < end; start += block) adam_block(call, start, smaller(block, end - start), work);
}

INLINE void adam(const memferry_adam_call *call) {
    size_t count = call->operands.count, body = count - smaller(call->operands.tail, count);
    blocks(call, 0, body, BODY);
    blocks(call, body, count, TAIL);
    stream_fence();
}

INLINE void traffic(const memferry_adam_call *call) {
    blocks(call, 0, call->operands.count, TRAFFIC);
    stream_fence();
}

VARIANTS(memferry_adam_update, memferry_adam_call, adam)
VARIANTS(memferry_adam_traffic, memferry_adam_call, traffic)

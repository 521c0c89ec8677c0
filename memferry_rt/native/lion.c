/* Lion (Chen et al., 2023), as memferry_rt.optim.Lion computes it. */
#include "blocks.h"

INLINE one_state lion_element(float parameter, float gradient, float mean, const memferry_lion *a) {
    one_state next;
    float mixed = fmaf(gradient, a->update_weight, mean * a->update_keep);
    float update = (float)((mixed > 0.0f) - (mixed < 0.0f));
    if (a->decay != 0.0f) update = fmaf(parameter, a->decay, update);
    next.parameter = fmaf(update, a->minus_step, parameter);
    next.state = fmaf(gradient, a->mean_weight, mean * a->mean_keep);
    return next;
}

ONE_STATE(lion, memferry_lion, lion_element)

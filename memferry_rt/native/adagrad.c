/* Adagrad, as torch.optim.Adagrad computes it. */
#include "blocks.h"

INLINE one_state adagrad_element(float parameter, float gradient, float sum, const memferry_adagrad *a) {
    one_state next;
    if (a->l2_decay != 0.0f) gradient = fmaf(parameter, a->l2_decay, gradient);
    next.state = fmaf(gradient, gradient, sum);
    next.parameter = parameter + (a->minus_step * gradient) / (sqrtf(next.state) + a->eps);
    return next;
}

ONE_STATE(adagrad, memferry_adagrad, adagrad_element)

/* Stochastic gradient descent with momentum, as torch.optim.SGD computes it. */
#include "blocks.h"

INLINE one_state sgd_element(float parameter, float gradient, float buffer, const memferry_sgd *a) {
    one_state next;
    if (a->l2_decay != 0.0f) gradient = fmaf(parameter, a->l2_decay, gradient);
    float mixed = fmaf(gradient, a->gradient_weight, buffer * a->momentum);
    next.state = a->bare ? buffer : a->first ? gradient : mixed;
    float ahead = fmaf(next.state, a->momentum, gradient);
    float direction = a->bare ? gradient : a->nesterov ? ahead : next.state;
    next.parameter = fmaf(direction, a->minus_step, parameter);
    return next;
}

ONE_STATE(sgd, memferry_sgd, sgd_element)

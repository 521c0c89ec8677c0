/* What a step's calls share, for optimizers with at most one state: computed in double, then rounded. */
typedef struct {
    float gradient_factor; /* multiplied into the gradient; negative to maximize */
    float l2_decay;        /* weight_decay */
    float momentum;
    float gradient_weight; /* 1 - dampening */
    float minus_step;      /* -lr */
    int first;             /* the buffer is made in this step */
    int nesterov;
    int bare;              /* without momentum */
} memferry_sgd;

typedef struct {
    float gradient_factor;
    float l2_decay;
    float minus_step; /* -lr / (1 + (step - 1) * lr_decay) */
    float eps;
} memferry_adagrad;

typedef struct {
    float gradient_factor;
    float decay;       /* weight_decay */
    float minus_step;  /* -lr */
    float update_keep; /* beta1 */
    float update_weight;
    float mean_keep; /* beta2 */
    float mean_weight;
} memferry_lion;

/* See memferry_adam_operands; `state` and `out_state` are 0 where there is none. */
typedef struct {
    uintptr_t parameter, state;         /* fp32 */
    uintptr_t out_parameter, out_state; /* each its input, or memory that overlaps no operand */
    uintptr_t gradient;
    uintptr_t weight;
    int gradient_dtype;
    int weight_dtype;
    size_t count;
} memferry_one_state_operands;

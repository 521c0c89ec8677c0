enum { MEMFERRY_FLOAT32 = 0, MEMFERRY_BFLOAT16 = 1, MEMFERRY_FLOAT16 = 2 };

/* What a step's calls share: computed in double, then rounded.  See docs/numerics.md. */
typedef struct {
    float keep;               /* 1 - lr * weight_decay where the decay is decoupled, else 1 */
    float l2_decay;           /* weight_decay where it is not, else 0 */
    float mean_weight;        /* 1 - beta1, and 1 less where lerp_from_gradient, in fp32 */
    float tail_mean_weight;   /* the same, but -0 where it is 0 and lerp_from_gradient */
    int lerp_from_gradient;   /* 1 - beta1 is 0.5 or more */
    float square_weight;      /* 1 - beta2 */
    float square_keep;        /* beta2 */
    float square_correction;  /* sqrt(1 - beta2 ** step) */
    float minus_step;         /* -lr / (1 - beta1 ** step) */
    float eps;
    float gradient_factor;    /* multiplied into the gradient; negative to maximize */
} memferry_adam;

/* `count` elements of one parameter; addresses are of the host, or of the device for its kernel. */
typedef struct {
    uintptr_t parameter, exp_avg, exp_avg_sq;             /* fp32 */
    uintptr_t out_parameter, out_exp_avg, out_exp_avg_sq; /* each its input, or memory that overlaps no operand */
    uintptr_t gradient;                                   /* of gradient_dtype; only read */
    uintptr_t weight;                                     /* of weight_dtype: the new parameter rounded; 0 for none */
    int gradient_dtype;
    int weight_dtype;
    size_t count;
    size_t tail; /* how many of the last elements PyTorch updates outside of its vector loop */
} memferry_adam_operands;

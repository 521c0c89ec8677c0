enum { MEMFERRY_FLOAT32 = 0, MEMFERRY_BFLOAT16 = 1, MEMFERRY_FLOAT16 = 2 };
enum { MEMFERRY_GENERIC = 0, MEMFERRY_AVX2 = 1, MEMFERRY_AVX512 = 2 };

typedef struct {
    float keep;               /* 1 - lr * weight_decay where the decay is decoupled, else 1 */
    float l2_decay;           /* weight_decay where it is not, else 0 */
    float mean_weight;        /* 1 - beta1, and 1 less where lerp_from_gradient, in fp32 */
    int lerp_from_gradient;   /* 1 - beta1 is 0.5 or more */
    float square_weight;      /* 1 - beta2 */
    float square_keep;        /* beta2 */
    float square_correction;  /* sqrt(1 - beta2 ** step) */
    float minus_step;         /* -lr / (1 - beta1 ** step) */
    float eps;
    float scale;              /* multiplied into the gradient */
    int maximize;
} memferry_adam;

typedef struct {
    const float *parameter, *exp_avg, *exp_avg_sq;
    float *out_parameter, *out_exp_avg, *out_exp_avg_sq; /* each its input, or memory of its own */
    const void *gradient;
    int gradient_dtype;
    void *weight; /* gets the new parameter rounded; may be NULL */
    int weight_dtype;
} memferry_adam_operands;

/* The fastest variant that this processor runs. */
int memferry_adam_best_variant(void);

void memferry_adam_update(int variant, const memferry_adam_operands *o, size_t count, const memferry_adam *a);

enum { MEMFERRY_GENERIC = 0, MEMFERRY_AVX2 = 1, MEMFERRY_AVX512 = 2 };

/* The fastest variant that this processor runs. */
int memferry_best_variant(void);

/* How a kernel goes through memory; no result depends on it. */
typedef struct {
    size_t block;   /* elements handled at a time, at most MEMFERRY_BLOCK */
    int stream_out; /* non-temporal stores into state that lies elsewhere */
    int stream_weight;
} memferry_tuning;

enum { MEMFERRY_BLOCK = 4096 };

typedef struct {
    memferry_adam_operands operands;
    const memferry_adam *settings;
    const memferry_tuning *tuning;
    int variant;
} memferry_adam_call;

void memferry_adam_update(const memferry_adam_call *call);

/* `settings` are of the optimizer. */
typedef struct {
    memferry_one_state_operands operands;
    const void *settings;
    const memferry_tuning *tuning;
    int variant;
} memferry_one_state_call;

void memferry_sgd_update(const memferry_one_state_call *call);
void memferry_adagrad_update(const memferry_one_state_call *call);
void memferry_lion_update(const memferry_one_state_call *call);

/* The fp64 sums of squares of blocks of MEMFERRY_NORM_BLOCK elements, the last one perhaps shorter. */
typedef struct {
    uintptr_t values;
    int dtype;
    size_t count;
    double *sums;
    int variant;
} memferry_squares_call;

enum { MEMFERRY_NORM_BLOCK = 4096, MEMFERRY_NORM_LANES = 64 };

void memferry_squares(const memferry_squares_call *call);

/* Reduces `count` sums to one, overwriting them. */
double memferry_reduce(double *sums, size_t count);

/* target += source, rounded to the target's dtype. */
typedef struct {
    uintptr_t target, source;
    int target_dtype, source_dtype;
    size_t count;
    int variant;
} memferry_add_call;

void memferry_add(const memferry_add_call *call);

/* target = source in the target's dtype. */
typedef memferry_add_call memferry_convert_call;

void memferry_convert(const memferry_convert_call *call);

/* The memory traffic of an update without its arithmetic: what it could reach at best. */
void memferry_adam_traffic(const memferry_adam_call *call);

/* -- threads ------------------------------------------------------------------------------------------------------ */

enum {
    MEMFERRY_ADAM = 0,
    MEMFERRY_SQUARES = 1,
    MEMFERRY_ADD = 2,
    MEMFERRY_CONVERT = 3,
    MEMFERRY_TRAFFIC = 4,
    MEMFERRY_SGD = 5,
    MEMFERRY_ADAGRAD = 6,
    MEMFERRY_LION = 7,
};

typedef struct memferry_pool memferry_pool;
typedef struct memferry_batch memferry_batch;

/* NULL where the system gives no thread. */
memferry_pool *memferry_pool_open(int threads);

/* Finishes what is queued, then ends the threads. */
void memferry_pool_close(memferry_pool *pool);

/* Queues calls of one kind, which stay where they are until the batch is done; NULL without memory. */
memferry_batch *memferry_pool_submit(memferry_pool *pool, int kind, const void *calls, size_t count);

/* Both work after the pool's end, too; no thread may wait while another closes the pool. */
int memferry_batch_done(memferry_batch *batch);
void memferry_batch_wait(memferry_batch *batch);

/* Frees a batch that is done. */
void memferry_batch_free(memferry_batch *batch);

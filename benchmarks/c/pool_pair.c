/* What a cached allocate + free pair costs, as JSON with every sample.
 *
 *     make -C benchmarks/c && benchmarks/c/pool_pair [device] > result.json
 *
 * Both clocks are given: on a busy machine only the processor time says what the pair costs.
 * A GPU is not needed where MEMFERRY_LIBCUDA names a stand-in for the driver: the figure is then the library's own.
 */
#define _POSIX_C_SOURCE 200809L
#include <memferry.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>
#include <time.h>

enum { SAMPLES = 21, PAIRS = 200000 };

static void require(memferry_status status)
{
    if (status == MEMFERRY_OK)
        return;
    fprintf(stderr, "%s\n", memferry_last_error());
    exit(1);
}

static double now(clockid_t clock)
{
    struct timespec at;
    clock_gettime(clock, &at);
    return (double)at.tv_sec + 1e-9 * (double)at.tv_nsec;
}

/* Seconds of a clock for one pair. */
static void sample(memferry_pool *pool, memferry_stream stream, size_t nbytes, double *wall, double *cpu)
{
    memferry_ptr pointer;
    double wall_start = now(CLOCK_MONOTONIC), cpu_start = now(CLOCK_THREAD_CPUTIME_ID);
    for (int i = 0; i < PAIRS; i++) {
        require(memferry_allocate(pool, nbytes, stream, &pointer));
        require(memferry_free(pool, pointer, nbytes, stream));
    }
    *cpu = (now(CLOCK_THREAD_CPUTIME_ID) - cpu_start) / PAIRS;
    *wall = (now(CLOCK_MONOTONIC) - wall_start) / PAIRS;
}

static int ascending(const void *one, const void *other)
{
    double a = *(const double *)one, b = *(const double *)other;
    return (a > b) - (a < b);
}

/* The samples of one clock under its name, and their median. */
static void print_samples(const char *name, const double *samples)
{
    double sorted[SAMPLES];
    memcpy(sorted, samples, sizeof sorted);
    qsort(sorted, SAMPLES, sizeof *sorted, ascending);
    printf(", \"%s_median_s\": %.3e, \"%s_samples_s\": [", name, sorted[SAMPLES / 2], name);
    for (int i = 0; i < SAMPLES; i++)
        printf("%s%.3e", i == 0 ? "" : ", ", samples[i]);
    printf("]");
}

int main(int count, char **arguments)
{
    const size_t nbytes = (size_t)1 << 20, budget = (size_t)256 << 20;
    memferry_device *device = NULL;
    memferry_pool *pool = NULL;
    memferry_stream stream;
    memferry_ptr others[64];
    struct utsname machine;
    double wall[SAMPLES], cpu[SAMPLES];

    uname(&machine);
    require(memferry_open(count > 1 ? atoi(arguments[1]) : 0, NULL, &device));
    require(memferry_pool_open(device, budget, &pool));
    require(memferry_stream_create(device, &stream));
    for (size_t i = 0; i < 64; i++)
        require(memferry_allocate(pool, 4096 * (i + 1), stream, &others[i]));
    sample(pool, stream, nbytes, &wall[0], &cpu[0]); /* warms up */
    for (int i = 0; i < SAMPLES; i++)
        sample(pool, stream, nbytes, &wall[i], &cpu[i]);

    printf("{\"schema\": 1, \"benchmark\": \"pool_pair\", \"version\": \"%s\", \"machine\": \"%s %s\", ", memferry_version(),
           machine.machine, machine.release);
    printf("\"driver\": \"%s\", \"nbytes\": %zu, \"pairs_a_sample\": %d, \"live_beside\": 64",
           getenv("MEMFERRY_LIBCUDA") != NULL ? getenv("MEMFERRY_LIBCUDA") : "libcuda.so.1", nbytes, PAIRS);
    print_samples("wall", wall);
    print_samples("cpu", cpu);
    printf("}\n");

    for (size_t i = 0; i < 64; i++)
        require(memferry_free(pool, others[i], 4096 * (i + 1), stream));
    require(memferry_stream_destroy(device, stream));
    require(memferry_pool_close(&pool));
    require(memferry_close(&device));
    return 0;
}

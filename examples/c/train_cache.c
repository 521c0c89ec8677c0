/* A layer's weights in host memory, cached on the device: what a C or C++ trainer does with MemFerry.
 *
 *     make && ./train_cache [device]
 *
 * Two streams use the pool in turn: one loads a layer, the other sends it home through the mapped pointer.
 * Exits with 0 only if every byte came back right.
 */
#include <memferry.h>

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 6, STREAMS = 2 };
static const size_t LAYER_NBYTES = (size_t)1 << 20;
static const size_t BUDGET = (size_t)3 << 20; /* three layers at once, of six */

static void require(memferry_status status, const char *what)
{
    if (status == MEMFERRY_OK)
        return;
    fprintf(stderr, "%s: %s\n  %s\n", what, memferry_error_text(status), memferry_last_error());
    exit(1);
}

static unsigned char weight(int layer, size_t at)
{
    return (unsigned char)(31 * layer + 7 * (int)(at % 251) + (int)(at >> 16));
}

/* Host memory of somebody else's, registered, with the weights in it. */
static unsigned char *adopt_weights(memferry_device *device, memferry_ptr *mapped)
{
    size_t nbytes = LAYERS * LAYER_NBYTES;
    unsigned char *weights = (unsigned char *)aligned_alloc(4096, nbytes);
    if (weights == NULL)
        exit(1);
    for (int layer = 0; layer < LAYERS; layer++)
        for (size_t at = 0; at < LAYER_NBYTES; at++)
            weights[(size_t)layer * LAYER_NBYTES + at] = weight(layer, at);
    require(memferry_host_register(device, weights, nbytes, 0), "register the weights");
    require(memferry_host_device_pointer(device, weights, mapped), "ask for their device pointer");
    return weights;
}

/* One layer: to the device on one stream, and home into the arena on the same; the pool orders the rest. */
static void visit(memferry_device *device, memferry_pool *pool, memferry_stream stream, memferry_ptr from,
                  memferry_ptr to)
{
    memferry_ptr slab;
    require(memferry_allocate(pool, LAYER_NBYTES, stream, &slab), "allocate a slab");
    require(memferry_copy(device, slab, from, LAYER_NBYTES, stream), "load a layer");
    require(memferry_copy(device, to, slab, LAYER_NBYTES, stream), "send it home");
    require(memferry_free(pool, slab, LAYER_NBYTES, stream), "free the slab");
}

static int count_wrong(const unsigned char *home)
{
    int wrong = 0;
    for (int layer = 0; layer < LAYERS; layer++)
        for (size_t at = 0; at < LAYER_NBYTES; at++)
            wrong += home[(size_t)layer * LAYER_NBYTES + at] != weight(layer, at);
    return wrong;
}

int main(int count, char **arguments)
{
    memferry_device *device = NULL;
    memferry_pool *pool = NULL;
    memferry_stream streams[STREAMS];
    memferry_ptr mapped, mapped_home;
    void *home;
    memferry_statistics statistics;

    require(memferry_open(count > 1 ? atoi(arguments[1]) : 0, NULL, &device), "open the device");
    require(memferry_pool_open(device, BUDGET, &pool), "open a pool");
    for (int i = 0; i < STREAMS; i++)
        require(memferry_stream_create(device, &streams[i]), "create a stream");
    unsigned char *weights = adopt_weights(device, &mapped);
    require(memferry_host_allocate(device, LAYERS * LAYER_NBYTES, &home), "allocate an arena");
    require(memferry_host_device_pointer(device, home, &mapped_home), "ask for its device pointer");

    for (int layer = 0; layer < LAYERS; layer++) {
        memferry_ptr offset = (memferry_ptr)layer * LAYER_NBYTES;
        visit(device, pool, streams[layer % STREAMS], mapped + offset, mapped_home + offset);
    }
    for (int i = 0; i < STREAMS; i++)
        require(memferry_stream_synchronize(device, streams[i]), "wait for a stream");

    int wrong = count_wrong((const unsigned char *)home);
    require(memferry_pool_statistics(pool, &statistics), "ask for statistics");
    printf("wrong bytes %d; allocations %llu, peak %zu of %zu bytes, reused at once %llu, waits %llu\n", wrong,
           (unsigned long long)statistics.allocations, statistics.peak, statistics.budget,
           (unsigned long long)statistics.hits, (unsigned long long)statistics.waits);

    require(memferry_host_unregister(device, weights, LAYERS * LAYER_NBYTES), "unregister the weights");
    free(weights);
    require(memferry_host_free(device, home), "free the arena");
    for (int i = 0; i < STREAMS; i++)
        require(memferry_stream_destroy(device, streams[i]), "destroy a stream");
    require(memferry_pool_close(&pool), "close the pool");
    require(memferry_close(&device), "close the device");
    return wrong != 0;
}

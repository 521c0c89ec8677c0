/* Eight threads on one pool and one map of registrations, in memory that a sanitizer watches. */
#include <memferry.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { THREADS = 8, TURNS = 3000, SHELF = 64 };

typedef struct held {
    memferry_ptr pointer;
    size_t nbytes;
} held;

static memferry_device *device;
static memferry_pool *pool;
static memferry_stream streams[THREADS];
static held shelves[THREADS][SHELF];
static int counts[THREADS];
static pthread_mutex_t shelf_lock = PTHREAD_MUTEX_INITIALIZER;
static char registered[THREADS << 13];

static void require(int right)
{
    if (!right) {
        fprintf(stderr, "%s\n", memferry_last_error());
        abort();
    }
}

/* Put a block on the next thread's shelf; the oldest of the own shelf comes back, or nothing. */
static held hand_on(int number, held block)
{
    held own = {0, 0};
    pthread_mutex_lock(&shelf_lock);
    int next = (number + 1) % THREADS;
    if (counts[next] < SHELF) {
        shelves[next][counts[next]++] = block;
        if (counts[number] > 0)
            own = shelves[number][--counts[number]];
    } else {
        own = block;
    }
    pthread_mutex_unlock(&shelf_lock);
    return own;
}

static void *work(void *argument)
{
    int number = *(int *)argument;
    unsigned seed = (unsigned)number + 1;
    for (int turn = 0; turn < TURNS; turn++) {
        held block = {0, 1 + (seed = seed * 1664525u + 1013904223u) % 9000};
        memferry_status status = memferry_allocate(pool, block.nbytes, streams[number], &block.pointer);
        require(status == MEMFERRY_OK || status == MEMFERRY_OUT_OF_MEMORY);
        if (status == MEMFERRY_OK && turn % 3 == 0)
            require(memferry_record_use(pool, block.pointer, streams[(number + 3) % THREADS]) == MEMFERRY_OK);
        if (status == MEMFERRY_OK)
            block = hand_on(number, block);
        if (status == MEMFERRY_OK && block.nbytes != 0)
            require(memferry_free(pool, block.pointer, block.nbytes, streams[number]) == MEMFERRY_OK);
        require(memferry_free(pool, 3, 1, streams[number]) == MEMFERRY_INVALID);
        if (turn % 100 == 0) {
            char *start = registered + (turn / 100 + number) % THREADS * 4096;
            require(memferry_host_register(device, start, 8192, 0) == MEMFERRY_OK);
            require(memferry_host_unregister(device, start, 8192) == MEMFERRY_OK);
            require(memferry_pool_trim(pool, NULL) == MEMFERRY_OK);
        }
    }
    return NULL;
}

int main(void)
{
    pthread_t threads[THREADS];
    int numbers[THREADS];
    memferry_statistics found;
    void *arena;
    require(memferry_open(0, NULL, &device) == MEMFERRY_OK);
    require(memferry_pool_open(device, (size_t)1 << 20, &pool) == MEMFERRY_OK);
    require(memferry_host_allocate(device, (size_t)3 << 20, &arena) == MEMFERRY_OK);
    for (int i = 0; i < THREADS; i++)
        require(memferry_stream_create(device, &streams[i]) == MEMFERRY_OK);
    for (int i = 0; i < THREADS; i++) {
        numbers[i] = i;
        require(pthread_create(&threads[i], NULL, work, &numbers[i]) == 0);
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    for (int i = 0; i < THREADS; i++)
        while (counts[i] > 0) {
            held block = shelves[i][--counts[i]];
            require(memferry_free(pool, block.pointer, block.nbytes, streams[i]) == MEMFERRY_OK);
        }
    require(memferry_pool_statistics(pool, &found) == MEMFERRY_OK);
    require(found.used == 0 && found.live == 0 && found.largest_free == (size_t)1 << 20);
    for (int i = 0; i < THREADS; i++)
        require(memferry_stream_destroy(device, streams[i]) == MEMFERRY_OK);
    require(memferry_host_free(device, arena) == MEMFERRY_OK);
    require(memferry_pool_close(&pool) == MEMFERRY_OK && memferry_close(&device) == MEMFERRY_OK);
    printf("%llu allocations\n", (unsigned long long)found.allocations);
    return 0;
}

/* Threads that run batches of kernel calls in the order of submission, without Python and without its lock. */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "adam.h"
#include "one_state.h"
#include "kernels.h"

struct memferry_batch {
    memferry_pool *pool;
    memferry_batch *next;
    int kind;
    const char *calls;
    size_t count, taken;
    atomic_size_t done;
};

struct memferry_pool {
    pthread_mutex_t lock;
    pthread_cond_t work, progress;
    memferry_batch *first, **last; /* batches with calls that nobody has taken yet */
    int closing, threads;
    pthread_t thread[];
};

static size_t size_of_call(int kind) {
    switch (kind) {
    case MEMFERRY_SQUARES: return sizeof(memferry_squares_call);
    case MEMFERRY_ADD: return sizeof(memferry_add_call);
    case MEMFERRY_CONVERT: return sizeof(memferry_convert_call);
    case MEMFERRY_SGD:
    case MEMFERRY_ADAGRAD:
    case MEMFERRY_LION: return sizeof(memferry_one_state_call);
    default: return sizeof(memferry_adam_call);
    }
}

static void run_call(int kind, const void *call) {
    switch (kind) {
    case MEMFERRY_SQUARES: memferry_squares(call); break;
    case MEMFERRY_ADD: memferry_add(call); break;
    case MEMFERRY_CONVERT: memferry_convert(call); break;
    case MEMFERRY_TRAFFIC: memferry_adam_traffic(call); break;
    case MEMFERRY_SGD: memferry_sgd_update(call); break;
    case MEMFERRY_ADAGRAD: memferry_adagrad_update(call); break;
    case MEMFERRY_LION: memferry_lion_update(call); break;
    default: memferry_adam_update(call);
    }
}

static void *work(void *argument) {
    memferry_pool *pool = argument;
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        memferry_batch *batch = pool->first;
        if (!batch) {
            if (pool->closing) break;
            pthread_cond_wait(&pool->work, &pool->lock);
            continue;
        }
        size_t number = batch->taken++, count = batch->count;
        if (batch->taken == count) {
            pool->first = batch->next;
            if (!pool->first) pool->last = &pool->first;
        }
        pthread_mutex_unlock(&pool->lock);
        run_call(batch->kind, batch->calls + number * size_of_call(batch->kind));
        pthread_mutex_lock(&pool->lock);
        if (atomic_fetch_add(&batch->done, 1) + 1 == count) /* from here on it may be gone */
            pthread_cond_broadcast(&pool->progress);
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

memferry_pool *memferry_pool_open(int threads) {
    memferry_pool *pool = calloc(1, sizeof *pool + (size_t)threads * sizeof pool->thread[0]);
    if (!pool) return NULL;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->work, NULL);
    pthread_cond_init(&pool->progress, NULL);
    pool->last = &pool->first;
    sigset_t all, before; /* signals are for the threads that expect them */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (pool->threads < threads && !pthread_create(&pool->thread[pool->threads], NULL, work, pool)) pool->threads++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (pool->threads == threads) return pool;
    memferry_pool_close(pool);
    return NULL;
}

void memferry_pool_close(memferry_pool *pool) {
    pthread_mutex_lock(&pool->lock);
    pool->closing = 1;
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
    for (int i = 0; i < pool->threads; i++) pthread_join(pool->thread[i], NULL);
    pthread_cond_destroy(&pool->progress);
    pthread_cond_destroy(&pool->work);
    pthread_mutex_destroy(&pool->lock);
    free(pool);
}

memferry_batch *memferry_pool_submit(memferry_pool *pool, int kind, const void *calls, size_t count) {
    memferry_batch *batch = calloc(1, sizeof *batch);
    if (!batch) return NULL;
    batch->pool = pool;
    batch->kind = kind;
    batch->calls = calls;
    batch->count = count;
    if (!count) return batch;
    pthread_mutex_lock(&pool->lock);
    *pool->last = batch;
    pool->last = &batch->next;
    if (count == 1) pthread_cond_signal(&pool->work);
    else pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
    return batch;
}

int memferry_batch_done(memferry_batch *batch) { return atomic_load(&batch->done) == batch->count; }

void memferry_batch_wait(memferry_batch *batch) {
    if (memferry_batch_done(batch)) return; /* its pool is perhaps closed */
    pthread_mutex_lock(&batch->pool->lock);
    while (!memferry_batch_done(batch)) pthread_cond_wait(&batch->pool->progress, &batch->pool->lock);
    pthread_mutex_unlock(&batch->pool->lock);
}

void memferry_batch_free(memferry_batch *batch) { free(batch); }

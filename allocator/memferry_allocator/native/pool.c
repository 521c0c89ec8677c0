/* The device pool: one slab of device memory, reuse in stream order.
 *
 * The lock is held over calls that only enqueue (recording an event, letting a stream wait), never over those
 * that block (reserving, freeing, synchronising): `changing` keeps the other threads waiting for these.
 */
#include <stdlib.h>

#include "internal.h"
#include "ranges.h"
#include "users.h"

#define ALIGNMENT ((size_t)256)

struct memferry_pool {
    memferry_pool *next;
    memferry_device *device;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool changing;
    memferry_ptr base; /* 0: given back to the device */
    ranges ranges;
    users users;
    uint64_t clock; /* counts what was given back */
    memferry_statistics counts;
};

memferry_pool *pool_next(const memferry_pool *pool)
{
    return pool->next;
}

static void lock_settled(memferry_pool *self)
{
    pthread_mutex_lock(&self->lock);
    while (self->changing)
        pthread_cond_wait(&self->changed, &self->lock);
}

/* Let go of the lock for a blocking driver call; every other call waits meanwhile. */
static void change_begin(memferry_pool *self)
{
    self->changing = true;
    pthread_mutex_unlock(&self->lock);
}

static void change_end(memferry_pool *self)
{
    pthread_mutex_lock(&self->lock);
    self->changing = false;
    pthread_cond_broadcast(&self->changed);
}

/* -- the slab -- */
static memferry_status reserve(const memferry_device *device, size_t nbytes, memferry_ptr *base)
{
    const driver *cu = device->driver;
    scope inside;
    memferry_status status = scope_enter(&inside, device, true);
    if (status != MEMFERRY_OK)
        return status;
    cu_result code = cu->memory_allocate(base, nbytes);
    size_t left = 0, total = 0;
    if (code == CU_OUT_OF_MEMORY)
        cu->memory_info(&left, &total);
    scope_leave(&inside);
    if (code == CU_OUT_OF_MEMORY)
        return fail(MEMFERRY_OUT_OF_MEMORY,
                    "device pool: asked device %d for %s, %s of its %s are free; ask for less, or free what others hold",
                    device->ordinal, SIZE(nbytes), SIZE(left), SIZE(total));
    return code == CU_OK ? MEMFERRY_OK : driver_refused(cu, code, "device pool", "reserving %zu bytes", nbytes);
}

/* Wait for the device and give the slab back. */
static memferry_status release(const memferry_device *device, memferry_ptr base)
{
    const driver *cu = device->driver;
    scope inside;
    memferry_status status = scope_enter(&inside, device, true);
    if (status != MEMFERRY_OK)
        return status;
    cu_result code = cu->synchronize();
    if (code == CU_OK)
        code = cu->memory_free(base);
    scope_leave(&inside);
    return code == CU_OK ? MEMFERRY_OK : driver_refused(cu, code, "device pool", "freeing the slab");
}

static memferry_status take_slab(memferry_pool *self)
{
    memferry_ptr base = 0;
    change_begin(self);
    memferry_status status = reserve(self->device, self->counts.budget, &base);
    bool begun = status == MEMFERRY_OK && ranges_begin(&self->ranges, base, self->counts.budget);
    if (status == MEMFERRY_OK && !begun) {
        release(self->device, base);
        status = fail(MEMFERRY_OUT_OF_MEMORY, "device pool: the host has no memory left");
    }
    change_end(self);
    if (begun)
        self->base = base;
    return status;
}

static memferry_status give_slab(memferry_pool *self)
{
    change_begin(self);
    memferry_status status = release(self->device, self->base);
    change_end(self);
    if (status == MEMFERRY_OK) {
        ranges_end(&self->ranges);
        self->base = 0;
    }
    return status;
}

/* -- life -- */
memferry_status memferry_pool_open(memferry_device *device, size_t budget, memferry_pool **pool)
{
    memferry_status status = require_usable();
    if (status != MEMFERRY_OK)
        return status;
    if (device == NULL || pool == NULL)
        return fail(MEMFERRY_INVALID, "device pool: the device, or where to put the pool, is NULL");
    if (budget == 0)
        return fail(MEMFERRY_INVALID, "device pool: a budget of 0 bytes; give the bytes that it may take");
    memferry_pool *self = calloc(1, sizeof *self);
    if (self == NULL)
        return fail(MEMFERRY_OUT_OF_MEMORY, "device pool: the host has no memory left");
    self->device = device;
    self->counts.budget = budget;
    pthread_mutex_init(&self->lock, NULL);
    pthread_cond_init(&self->changed, NULL);
    lock_settled(self);
    status = take_slab(self);
    pthread_mutex_unlock(&self->lock);
    if (status != MEMFERRY_OK) {
        pthread_cond_destroy(&self->changed);
        pthread_mutex_destroy(&self->lock);
        free(self);
        return status;
    }
    pthread_mutex_lock(&device->lock);
    self->next = device->pools;
    device->pools = self;
    pthread_mutex_unlock(&device->lock);
    *pool = self;
    return MEMFERRY_OK;
}

static void unlist(memferry_pool *self)
{
    pthread_mutex_lock(&self->device->lock);
    memferry_pool **at = &self->device->pools;
    while (*at != self)
        at = &(*at)->next;
    *at = self->next;
    pthread_mutex_unlock(&self->device->lock);
}

static void drop_users(memferry_pool *self)
{
    scope inside;
    if (scope_enter(&inside, self->device, true) != MEMFERRY_OK)
        return; /* the events went with their context */
    for (int i = 0; i < self->users.count; i++)
        users_drop(&self->users, self->device->driver, i);
    scope_leave(&inside);
}

memferry_status memferry_pool_close(memferry_pool **pool)
{
    if (pool == NULL || *pool == NULL)
        return MEMFERRY_OK;
    memferry_status status = require_usable();
    if (status != MEMFERRY_OK)
        return status;
    memferry_pool *self = *pool;
    lock_settled(self);
    if (self->ranges.live_count != 0)
        status = fail(MEMFERRY_BUSY, "device pool: close: %zu allocations are still live; free them first",
                      self->ranges.live_count);
    else if (self->base != 0)
        status = give_slab(self);
    pthread_mutex_unlock(&self->lock);
    if (status != MEMFERRY_OK)
        return status;
    unlist(self);
    drop_users(self);
    pthread_cond_destroy(&self->changed);
    pthread_mutex_destroy(&self->lock);
    free(self);
    *pool = NULL;
    return MEMFERRY_OK;
}

/* -- streams -- */
/* Wait for the whole device without the lock; what was free then is in use by nobody. */
static memferry_status settle(memferry_pool *self)
{
    const driver *cu = self->device->driver;
    uint64_t clock = self->clock;
    scope inside;
    pthread_mutex_unlock(&self->lock);
    memferry_status status = scope_enter(&inside, self->device, true);
    if (status == MEMFERRY_OK) {
        cu_result code = cu->synchronize();
        scope_leave(&inside);
        if (code != CU_OK)
            status = driver_refused(cu, code, "device pool", "waiting for the device");
    }
    lock_settled(self);
    if (status == MEMFERRY_OK)
        ranges_settle(&self->ranges, clock);
    return status;
}

/* The number of a stream; room is made for it where too many are known, or its handle was another stream's. */
static memferry_status find_user(memferry_pool *self, memferry_stream stream, unsigned long long identity, int *number)
{
    int stale = 0;
    *number = users_find(&self->users, stream, identity, &stale);
    if (*number >= 0)
        return MEMFERRY_OK;
    bool full = *number == USERS_FULL;
    memferry_status status = settle(self);
    if (status != MEMFERRY_OK)
        return status;
    scope inside;
    status = scope_enter(&inside, self->device, true);
    if (status != MEMFERRY_OK)
        return status;
    uses in_use = ranges_users(&self->ranges);
    for (int i = 0; i < self->users.count; i++) {
        const user *one = &self->users.list[i];
        bool is_stale = !full && one->known && one->handle == stream && one->identity != identity;
        if (is_stale)
            ranges_forget(&self->ranges, i);
        if (is_stale || (full && !uses_has(&in_use, i)))
            users_drop(&self->users, self->device->driver, i);
    }
    scope_leave(&inside);
    *number = users_find(&self->users, stream, identity, &stale);
    if (*number < 0)
        return fail(MEMFERRY_BUSY, "device pool: %d streams use its memory at once; forget those that are done with it",
                    RANGES_STREAMS);
    return MEMFERRY_OK;
}

memferry_status memferry_pool_forget_stream(memferry_pool *pool, memferry_stream stream)
{
    memferry_status status = require_usable();
    if (status != MEMFERRY_OK)
        return status;
    if (pool == NULL)
        return fail(MEMFERRY_INVALID, "forget stream: the pool is NULL");
    if (stream == CU_STREAM_LEGACY)
        stream = NULL;
    scope inside;
    status = scope_enter(&inside, pool->device, true);
    if (status != MEMFERRY_OK)
        return status;
    const driver *cu = pool->device->driver;
    lock_settled(pool);
    if (users_known(&pool->users, stream) >= 0) {
        pthread_mutex_unlock(&pool->lock);
        cu_result code = cu->stream_synchronize(stream);
        lock_settled(pool);
        int number = users_known(&pool->users, stream); /* again: the lock was open */
        if (code != CU_OK) {
            status = driver_refused(cu, code, "forget stream", "waiting for stream %p", stream);
        } else if (number >= 0) {
            ranges_forget(&pool->ranges, number);
            users_drop(&pool->users, cu, number);
        }
    }
    pthread_mutex_unlock(&pool->lock);
    scope_leave(&inside);
    return status;
}

/* -- allocating -- */
static memferry_status refuse_size(const memferry_pool *self, size_t nbytes)
{
    const memferry_statistics *counts = &self->counts;
    return fail(MEMFERRY_OUT_OF_MEMORY,
                "device pool: asked for %s, %s of %s in use, largest free block %s; free something, or make the pool larger",
                SIZE(nbytes), SIZE(counts->used), SIZE(counts->budget), SIZE(ranges_largest(&self->ranges)));
}

/* The tightest free block that the stream can be ordered on. */
static memferry_status find_fit(memferry_pool *self, size_t nbytes, int number, block **found)
{
    scope inside; /* an event is made in the context that is current */
    memferry_status status = scope_enter(&inside, self->device, false);
    if (status != MEMFERRY_OK)
        return status;
    for (block *at = ranges_fit(&self->ranges, nbytes, NULL); at != NULL; at = ranges_fit(&self->ranges, nbytes, at)) {
        status = users_order(&self->users, self->device->driver, number, at, self->clock, &self->counts.waits);
        if (status == MEMFERRY_OK)
            *found = at;
        if (status != MEMFERRY_CAPTURING)
            break;
    }
    scope_leave(&inside);
    return status;
}

static memferry_status find_block(memferry_pool *self, size_t nbytes, int number, block **found)
{
    *found = ranges_cached(&self->ranges, nbytes, number);
    if (*found != NULL) {
        self->counts.hits++;
        return MEMFERRY_OK;
    }
    memferry_status status = find_fit(self, nbytes, number, found);
    if (*found == NULL && (status == MEMFERRY_OK || status == MEMFERRY_CAPTURING)) {
        ranges_join(&self->ranges);
        status = find_fit(self, nbytes, number, found);
    }
    return *found == NULL && status == MEMFERRY_OK ? refuse_size(self, nbytes) : status;
}

static memferry_status allocate_locked(memferry_pool *self, size_t nbytes, memferry_stream stream,
                                       unsigned long long identity, memferry_ptr *pointer)
{
    int number;
    block *found = NULL;
    memferry_status status = find_user(self, stream, identity, &number);
    if (status == MEMFERRY_OK && self->base == 0)
        status = take_slab(self);
    if (status == MEMFERRY_OK && !ranges_prepare(&self->ranges))
        status = fail(MEMFERRY_OUT_OF_MEMORY, "device pool: the host has no memory left");
    if (status == MEMFERRY_OK)
        status = find_block(self, nbytes, number, &found);
    if (status != MEMFERRY_OK)
        return status;
    ranges_take(&self->ranges, found, nbytes);
    memferry_statistics *counts = &self->counts;
    counts->allocations++;
    counts->used += nbytes;
    counts->peak = counts->used > counts->peak ? counts->used : counts->peak;
    *pointer = found->start;
    return MEMFERRY_OK;
}

/* Learn who a stream is. */
static memferry_status begin(scope *inside, memferry_pool *pool, memferry_stream *stream, const char *call,
                             unsigned long long *identity)
{
    memferry_status status = require_usable();
    if (status != MEMFERRY_OK)
        return status;
    if (pool == NULL)
        return fail(MEMFERRY_INVALID, "%s: the pool is NULL; open one with memferry_pool_open", call);
    return stream_identity(inside, pool->device, stream, call, identity);
}

memferry_status memferry_allocate(memferry_pool *pool, size_t nbytes, memferry_stream stream, memferry_ptr *pointer)
{
    if (pointer == NULL)
        return fail(MEMFERRY_INVALID, "allocate: there is nowhere to put the pointer");
    scope inside;
    unsigned long long identity;
    memferry_status status = begin(&inside, pool, &stream, "allocate", &identity);
    if (status != MEMFERRY_OK)
        return status;
    if (nbytes == 0) {
        *pointer = 0;
    } else {
        lock_settled(pool);
        if (nbytes > pool->counts.budget)
            status = refuse_size(pool, nbytes);
        else
            status = allocate_locked(pool, (nbytes + ALIGNMENT - 1) & ~(ALIGNMENT - 1), stream, identity, pointer);
        pthread_mutex_unlock(&pool->lock);
    }
    scope_leave(&inside);
    return status;
}

/* -- giving back -- */
static memferry_status find_live(const memferry_pool *self, memferry_ptr pointer, const char *call, block **found)
{
    *found = ranges_live(&self->ranges, pointer);
    if (*found != NULL)
        return MEMFERRY_OK;
    return fail(MEMFERRY_INVALID,
                "%s: %#llx is not a live allocation of this pool; it was freed twice, is an interior pointer, or is "
                "somebody else's",
                call, (unsigned long long)pointer);
}

static memferry_status free_locked(memferry_pool *self, memferry_ptr pointer, size_t nbytes, memferry_stream stream,
                                   unsigned long long identity)
{
    int number;
    block *held;
    memferry_status status = find_live(self, pointer, "free", &held);
    if (status != MEMFERRY_OK)
        return status;
    if (nbytes == 0 || nbytes > held->nbytes || held->nbytes - nbytes >= ALIGNMENT)
        return fail(MEMFERRY_INVALID, "free: %#llx has %zu bytes, not %zu; pointer and size do not belong together",
                    (unsigned long long)pointer, held->nbytes, nbytes);
    status = find_user(self, stream, identity, &number);
    if (status != MEMFERRY_OK)
        return status;
    held = ranges_live(&self->ranges, pointer); /* another thread may have run while the pool settled */
    if (held == NULL)
        return find_live(self, pointer, "free", &held);
    self->counts.frees++;
    self->counts.used -= held->nbytes;
    uses_add(&held->uses, number);
    held->stream = number;
    held->freed = ++self->clock;
    ranges_give(&self->ranges, held);
    return MEMFERRY_OK;
}

memferry_status memferry_free(memferry_pool *pool, memferry_ptr pointer, size_t nbytes, memferry_stream stream)
{
    scope inside;
    unsigned long long identity;
    memferry_status status = begin(&inside, pool, &stream, "free", &identity);
    if (status != MEMFERRY_OK)
        return status;
    if (pointer != 0 || nbytes != 0) {
        lock_settled(pool);
        status = free_locked(pool, pointer, nbytes, stream, identity);
        pthread_mutex_unlock(&pool->lock);
    }
    scope_leave(&inside);
    return status;
}

memferry_status memferry_record_use(memferry_pool *pool, memferry_ptr pointer, memferry_stream stream)
{
    scope inside;
    unsigned long long identity;
    memferry_status status = begin(&inside, pool, &stream, "record use", &identity);
    if (status != MEMFERRY_OK)
        return status;
    int number;
    block *held;
    lock_settled(pool);
    status = find_user(pool, stream, identity, &number);
    if (status == MEMFERRY_OK)
        status = find_live(pool, pointer, "record use", &held);
    if (status == MEMFERRY_OK)
        uses_add(&held->uses, number);
    pthread_mutex_unlock(&pool->lock);
    scope_leave(&inside);
    return status;
}

/* -- trim and statistics -- */
memferry_status memferry_pool_trim(memferry_pool *pool, size_t *released)
{
    memferry_status status = require_usable();
    if (status != MEMFERRY_OK)
        return status;
    if (pool == NULL)
        return fail(MEMFERRY_INVALID, "trim: the pool is NULL");
    size_t gone = 0;
    lock_settled(pool);
    if (pool->base != 0) {
        ranges_join(&pool->ranges);
        if (pool->ranges.live_count == 0) {
            status = give_slab(pool);
            gone = status == MEMFERRY_OK ? pool->counts.budget : 0;
        }
    }
    pthread_mutex_unlock(&pool->lock);
    if (released != NULL)
        *released = gone;
    return status;
}

memferry_status memferry_pool_statistics(memferry_pool *pool, memferry_statistics *statistics)
{
    memferry_status status = require_usable();
    if (status != MEMFERRY_OK)
        return status;
    if (pool == NULL || statistics == NULL)
        return fail(MEMFERRY_INVALID, "statistics: the pool, or where to put them, is NULL");
    lock_settled(pool);
    *statistics = pool->counts;
    statistics->reserved = pool->base != 0 ? pool->counts.budget : 0;
    statistics->cached = pool->ranges.cached;
    statistics->live = pool->ranges.live_count;
    statistics->largest_free =
        pool->base != 0 ? ranges_largest(&pool->ranges) & ~(ALIGNMENT - 1) : pool->counts.budget & ~(ALIGNMENT - 1);
    pthread_mutex_unlock(&pool->lock);
    return MEMFERRY_OK;
}

/* Pinned host memory of the library's own: huge pages, resident, registered, of the exact size. */
#define _DEFAULT_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "internal.h"

#define HUGE_PAGE ((size_t)2 << 20)
#define SHARE ((size_t)64 << 20) /* bytes worth a thread of their own */
#define MOST_THREADS 64

typedef struct arena {
    struct arena *next;
    void *address;
    size_t nbytes;
} arena;

typedef struct touch_share {
    char *start;
    size_t nbytes;
} touch_share;

static void *touch_one(void *argument)
{
    const touch_share *share = argument;
    memset(share->start, 0, share->nbytes);
    return NULL;
}

/* Make every page resident, in parallel; a thread that cannot be had leaves its share to this one. */
static void touch(char *start, size_t nbytes)
{
    long processors = sysconf(_SC_NPROCESSORS_ONLN);
    size_t count = nbytes / SHARE + 1, most = processors < 1 ? 1 : (size_t)processors;
    count = count > most ? most : count;
    count = count > MOST_THREADS ? MOST_THREADS : count;
    size_t each = (nbytes / count + HUGE_PAGE) & ~(HUGE_PAGE - 1);
    touch_share shares[MOST_THREADS];
    pthread_t threads[MOST_THREADS];
    bool started[MOST_THREADS];
    size_t used = 0;
    for (size_t offset = 0; offset < nbytes; offset += each, used++) {
        shares[used] = (touch_share){start + offset, nbytes - offset < each ? nbytes - offset : each};
        started[used] = offset + each < nbytes && pthread_create(&threads[used], NULL, touch_one, &shares[used]) == 0;
        if (!started[used])
            touch_one(&shares[used]);
    }
    while (used-- > 0)
        if (started[used])
            pthread_join(threads[used], NULL);
}

/* Map at a huge-page boundary and nothing beside it; NULL and errno where there is no room. */
static void *map_aligned(size_t nbytes)
{
    char *start = mmap(NULL, nbytes + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED)
        return NULL;
    char *aligned = (char *)(((uintptr_t)start + HUGE_PAGE - 1) & ~(uintptr_t)(HUGE_PAGE - 1));
    char *end = start + nbytes + HUGE_PAGE;
    if (aligned > start)
        munmap(start, (size_t)(aligned - start));
    if (aligned + nbytes < end)
        munmap(aligned + nbytes, (size_t)(end - (aligned + nbytes)));
    madvise(aligned, nbytes, MADV_HUGEPAGE); /* refused where the kernel has none: small pages do as well */
    return aligned;
}

memferry_status memferry_host_allocate(memferry_device *device, size_t nbytes, void **address)
{
    memferry_status status = require_usable();
    if (status != MEMFERRY_OK)
        return status;
    if (device == NULL || address == NULL)
        return fail(MEMFERRY_INVALID, "host allocate: the device, or where to put the address, is NULL");
    if (nbytes == 0) {
        *address = NULL;
        return MEMFERRY_OK;
    }
    size_t page = (size_t)sysconf(_SC_PAGESIZE), asked = nbytes;
    if (nbytes > SIZE_MAX - HUGE_PAGE - page)
        return fail(MEMFERRY_INVALID, "host allocate: %zu bytes are more than an address can hold", asked);
    nbytes = (nbytes + page - 1) & ~(page - 1);
    arena *new = malloc(sizeof *new);
    void *pages = new == NULL ? NULL : map_aligned(nbytes);
    if (pages == NULL) {
        free(new);
        return fail(MEMFERRY_OUT_OF_MEMORY, "host allocate: %s cannot be mapped (%s); ask for less", SIZE(asked),
                    strerror(errno));
    }
    touch(pages, nbytes);
    status = memferry_host_register(device, pages, nbytes, 0);
    if (status != MEMFERRY_OK) {
        munmap(pages, nbytes);
        free(new);
        return status;
    }
    pthread_mutex_lock(&device->lock);
    *new = (arena){device->arenas, pages, nbytes};
    device->arenas = new;
    pthread_mutex_unlock(&device->lock);
    *address = pages;
    return MEMFERRY_OK;
}

memferry_status memferry_host_free(memferry_device *device, void *address)
{
    memferry_status status = require_usable();
    if (status != MEMFERRY_OK || address == NULL)
        return status;
    if (device == NULL)
        return fail(MEMFERRY_INVALID, "host free: the device is NULL");
    pthread_mutex_lock(&device->lock);
    arena **at = &device->arenas;
    while (*at != NULL && (*at)->address != address)
        at = &(*at)->next;
    arena *held = *at;
    if (held != NULL)
        *at = held->next;
    pthread_mutex_unlock(&device->lock);
    if (held == NULL)
        return fail(MEMFERRY_INVALID, "host free: %p is not a live memferry_host_allocate of this device; it was freed twice, "
                                      "or is somebody else's", address);
    status = memferry_host_unregister(device, held->address, held->nbytes);
    if (status != MEMFERRY_OK) { /* a device may still reach the pages: they stay */
        pthread_mutex_lock(&device->lock);
        held->next = device->arenas;
        device->arenas = held;
        pthread_mutex_unlock(&device->lock);
        return status;
    }
    munmap(held->address, held->nbytes);
    free(held);
    return MEMFERRY_OK;
}

memferry_status memferry_host_statistics_get(memferry_device *device, memferry_host_statistics *statistics)
{
    memferry_status status = require_usable();
    if (status != MEMFERRY_OK)
        return status;
    if (device == NULL || statistics == NULL)
        return fail(MEMFERRY_INVALID, "host statistics: the device, or where to put them, is NULL");
    *statistics = (memferry_host_statistics){0};
    registration_totals(device->driver->registrations, &statistics->registered, &statistics->registrations);
    pthread_mutex_lock(&device->lock);
    for (const arena *at = device->arenas; at != NULL; at = at->next) {
        statistics->arenas++;
        statistics->arena_nbytes += at->nbytes;
    }
    pthread_mutex_unlock(&device->lock);
    return MEMFERRY_OK;
}

/* Registered host memory: what the driver holds (chunks) and who asked for it (claims).
 *
 * A range that is registered already never reaches the driver again; only the gaps do.  A chunk goes when no
 * claim touches it any more.  Registrations are serialised: the map and the driver must not disagree.
 */
#include <stdlib.h>
#include <sys/resource.h>

#include "internal.h"

typedef struct chunk {
    struct chunk *next; /* by address */
    uintptr_t start, end;
    bool read_only;
} chunk;

typedef struct claim {
    struct claim *next;
    uintptr_t start, end;
    size_t count;
} claim;

struct registration_map {
    pthread_mutex_t lock;
    chunk *chunks;
    claim *claims;
};

registration_map *registration_map_create(void)
{
    registration_map *map = calloc(1, sizeof *map);
    if (map != NULL)
        pthread_mutex_init(&map->lock, NULL);
    return map;
}

static void totals(const registration_map *map, size_t *nbytes, size_t *count)
{
    *nbytes = *count = 0;
    for (const chunk *at = map->chunks; at != NULL; at = at->next) {
        *nbytes += at->end - at->start;
        ++*count;
    }
}

void registration_totals(registration_map *map, size_t *nbytes, size_t *count)
{
    pthread_mutex_lock(&map->lock);
    totals(map, nbytes, count);
    pthread_mutex_unlock(&map->lock);
}

static claim **find_claim(registration_map *map, uintptr_t start, uintptr_t end)
{
    claim **at = &map->claims;
    while (*at != NULL && ((*at)->start != start || (*at)->end != end))
        at = &(*at)->next;
    return at;
}

static bool claimed_by_others(const registration_map *map, const chunk *held, const claim *except)
{
    for (const claim *at = map->claims; at != NULL; at = at->next)
        if (at != except && at->start < held->end && held->start < at->end)
            return true;
    return false;
}

static memferry_status refused_register(const memferry_device *device, cu_result code, uintptr_t start, size_t nbytes)
{
    size_t held, count;
    totals(device->driver->registrations, &held, &count);
    struct rlimit limit = {0, 0};
    bool limited = getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
    return driver_refused(device->driver, code, "host register",
                          "asked for %s at %#zx, %s are registered here already, the memory lock limit is %s; check that "
                          "the range is mapped and writable (else MEMFERRY_READ_ONLY), `ulimit -l` and the container's limit",
                          SIZE(nbytes), (size_t)start, SIZE(held), limited ? SIZE(limit.rlim_cur) : "none");
}

/* Unregister the chunks that carry `mark`, newest list position last; the first refusal is reported. */
static void roll_back(const memferry_device *device, chunk *const *marked, size_t count)
{
    registration_map *map = device->driver->registrations;
    while (count-- > 0) {
        cu_result code = device->driver->host_unregister((void *)marked[count]->start);
        if (code != CU_OK) {
            fail_more("; and undoing %#zx failed (%d)", (size_t)marked[count]->start, code);
            continue; /* the driver still holds it, so the map keeps it */
        }
        chunk **at = &map->chunks;
        while (*at != marked[count])
            at = &(*at)->next;
        *at = marked[count]->next;
        free(marked[count]);
    }
}

/* One more chunk with the driver and in the map. */
static memferry_status add_chunk(const memferry_device *device, uintptr_t start, uintptr_t end, bool read_only,
                                 chunk **added)
{
    chunk *new = malloc(sizeof *new);
    if (new == NULL)
        return fail(MEMFERRY_OUT_OF_MEMORY, "host register: the host has no memory left");
    unsigned flags = CU_REGISTER_PORTABLE | CU_REGISTER_MAPPED | (read_only ? CU_REGISTER_READ_ONLY : 0);
    cu_result code = device->driver->host_register((void *)start, end - start, flags);
    if (code != CU_OK) {
        free(new);
        return refused_register(device, code, start, end - start);
    }
    chunk **at = &device->driver->registrations->chunks;
    while (*at != NULL && (*at)->start < start)
        at = &(*at)->next;
    *new = (chunk){.next = *at, .start = start, .end = end, .read_only = read_only};
    *at = *added = new;
    return MEMFERRY_OK;
}

/* The next part of [position, end) that no chunk holds, at most `most` bytes; false when there is none. */
static bool next_gap(const registration_map *map, uintptr_t *position, uintptr_t end, size_t most, uintptr_t *gap_end)
{
    for (const chunk *at = map->chunks; at != NULL && *position < end; at = at->next) {
        if (at->end <= *position)
            continue;
        if (at->start > *position) {
            *gap_end = at->start < end ? at->start : end;
            if (*gap_end - *position > most)
                *gap_end = *position + most;
            return true;
        }
        *position = at->end;
    }
    if (*position >= end)
        return false;
    *gap_end = end - *position > most ? *position + most : end;
    return true;
}

static memferry_status fill_gaps(const memferry_device *device, uintptr_t start, uintptr_t end, bool read_only)
{
    chunk **added = NULL;
    size_t count = 0, room = 0;
    uintptr_t position = start, gap_end;
    memferry_status status = MEMFERRY_OK;
    while (status == MEMFERRY_OK &&
           next_gap(device->driver->registrations, &position, end, device->max_chunk, &gap_end)) {
        if (count == room) {
            room = room == 0 ? 8 : 2 * room;
            chunk **larger = realloc(added, room * sizeof *added);
            if (larger == NULL) {
                status = fail(MEMFERRY_OUT_OF_MEMORY, "host register: the host has no memory left");
                break;
            }
            added = larger;
        }
        status = add_chunk(device, position, gap_end, read_only, &added[count]);
        if (status == MEMFERRY_OK) {
            count++;
            position = gap_end;
        }
    }
    if (status != MEMFERRY_OK)
        roll_back(device, added, count);
    free(added);
    return status;
}

static memferry_status require_writable(const registration_map *map, uintptr_t start, uintptr_t end)
{
    for (const chunk *at = map->chunks; at != NULL; at = at->next)
        if (at->read_only && at->start < end && start < at->end)
            return fail(MEMFERRY_ALREADY_REGISTERED,
                        "host register: %#zx to %#zx is registered as read-only already, and writing was asked for; "
                        "unregister it first, or pass MEMFERRY_READ_ONLY",
                        (size_t)at->start, (size_t)at->end);
    return MEMFERRY_OK;
}

static memferry_status add_claim(const memferry_device *device, uintptr_t start, uintptr_t end, bool read_only)
{
    registration_map *map = device->driver->registrations;
    claim *known = *find_claim(map, start, end);
    memferry_status status = read_only ? MEMFERRY_OK : require_writable(map, start, end);
    claim *new = NULL;
    if (status == MEMFERRY_OK && known == NULL && (new = malloc(sizeof *new)) == NULL)
        status = fail(MEMFERRY_OUT_OF_MEMORY, "host register: the host has no memory left");
    if (status == MEMFERRY_OK)
        status = fill_gaps(device, start, end, read_only); /* also a known claim's, should an undo have left any */
    if (status != MEMFERRY_OK) {
        free(new);
    } else if (known != NULL) {
        known->count++;
    } else {
        *new = (claim){.next = map->claims, .start = start, .end = end, .count = 1};
        map->claims = new;
    }
    return status;
}

/* Drop one claim; where it was the last on a chunk, the chunk goes.  A refused chunk keeps the claim. */
static memferry_status drop_claim(const memferry_device *device, uintptr_t start, uintptr_t end)
{
    registration_map *map = device->driver->registrations;
    claim **at = find_claim(map, start, end), *held = *at;
    if (held == NULL)
        return fail(MEMFERRY_NOT_REGISTERED,
                    "host unregister: %s at %#zx were not registered here as such, or are unregistered already; pass the "
                    "address and size that were registered",
                    SIZE(end - start), (size_t)start);
    if (held->count > 1) {
        held->count--;
        return MEMFERRY_OK;
    }
    chunk **next = &map->chunks;
    while (*next != NULL) {
        chunk *one = *next;
        if (one->start >= end || start >= one->end || claimed_by_others(map, one, held)) {
            next = &one->next;
            continue;
        }
        cu_result code = device->driver->host_unregister((void *)one->start);
        if (code != CU_OK)
            return driver_refused(device->driver, code, "host unregister",
                                  "%#zx; work on the range must be over, and the owner unregisters before it unmaps; call "
                                  "again then",
                                  (size_t)one->start);
        *next = one->next;
        free(one);
    }
    *at = held->next;
    free(held);
    return MEMFERRY_OK;
}

static memferry_status check_range(const char *call, const memferry_device *device, const void *address, size_t nbytes)
{
    if (device == NULL)
        return fail(MEMFERRY_INVALID, "%s: the device is NULL; open one with memferry_open", call);
    if ((address == NULL && nbytes != 0) || (uintptr_t)address + nbytes < (uintptr_t)address)
        return fail(MEMFERRY_INVALID, "%s: %zu bytes at %p are no range of memory", call, nbytes, address);
    return require_usable();
}

memferry_status memferry_host_register(memferry_device *device, const void *address, size_t nbytes, int flags)
{
    memferry_status status = check_range("host register", device, address, nbytes);
    if (status != MEMFERRY_OK)
        return status;
    if ((flags & ~MEMFERRY_READ_ONLY) != 0)
        return fail(MEMFERRY_INVALID, "host register: unknown flags %#x; MEMFERRY_READ_ONLY or 0", (unsigned)flags);
    if (nbytes == 0)
        return MEMFERRY_OK;
    scope inside;
    status = scope_enter(&inside, device, true);
    if (status != MEMFERRY_OK)
        return status;
    pthread_mutex_lock(&device->driver->registrations->lock);
    status = add_claim(device, (uintptr_t)address, (uintptr_t)address + nbytes, (flags & MEMFERRY_READ_ONLY) != 0);
    pthread_mutex_unlock(&device->driver->registrations->lock);
    scope_leave(&inside);
    return status;
}

memferry_status memferry_host_unregister(memferry_device *device, const void *address, size_t nbytes)
{
    memferry_status status = check_range("host unregister", device, address, nbytes);
    if (status != MEMFERRY_OK || nbytes == 0)
        return status;
    scope inside;
    status = scope_enter(&inside, device, true);
    if (status != MEMFERRY_OK)
        return status;
    pthread_mutex_lock(&device->driver->registrations->lock);
    status = drop_claim(device, (uintptr_t)address, (uintptr_t)address + nbytes);
    pthread_mutex_unlock(&device->driver->registrations->lock);
    scope_leave(&inside);
    return status;
}

memferry_status memferry_host_range(memferry_device *device, const void *address, void **start, size_t *nbytes)
{
    memferry_status status = check_range("host range", device, address, 1);
    if (status != MEMFERRY_OK)
        return status;
    if (start == NULL || nbytes == NULL)
        return fail(MEMFERRY_INVALID, "host range: there is nowhere to put the answer");
    registration_map *map = device->driver->registrations;
    uintptr_t place = (uintptr_t)address;
    status = fail(MEMFERRY_NOT_REGISTERED, "host range: %p is not registered here; memferry_host_register it", address);
    pthread_mutex_lock(&map->lock);
    for (const chunk *at = map->chunks; at != NULL; at = at->next)
        if (at->start <= place && place < at->end) {
            *start = (void *)at->start;
            *nbytes = at->end - at->start;
            status = MEMFERRY_OK;
        }
    pthread_mutex_unlock(&map->lock);
    return status;
}

memferry_status memferry_host_device_pointer(memferry_device *device, const void *address, memferry_ptr *pointer)
{
    memferry_status status = check_range("host device pointer", device, address, 1);
    if (status != MEMFERRY_OK)
        return status;
    if (pointer == NULL)
        return fail(MEMFERRY_INVALID, "host device pointer: there is nowhere to put the answer");
    scope inside;
    status = scope_enter(&inside, device, true);
    if (status != MEMFERRY_OK)
        return status;
    cu_result code = device->driver->host_pointer(pointer, (void *)(uintptr_t)address, 0);
    scope_leave(&inside);
    if (code == CU_OK)
        return MEMFERRY_OK;
    if (code == CU_INVALID_VALUE)
        return fail(MEMFERRY_NOT_REGISTERED, "host device pointer: %p is not registered; memferry_host_register it",
                    address);
    return driver_refused(device->driver, code, "host device pointer", "%p", address);
}

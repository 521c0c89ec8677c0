/* What the parts of libmemferry share. */
#ifndef MEMFERRY_INTERNAL_H
#define MEMFERRY_INTERNAL_H

#include <pthread.h>
#include <stdbool.h>

#include "driver.h"
#include "memferry.h"

#define MEMFERRY_VERSION_TEXT "0.1.0"
#define KIB ((size_t)1 << 10)
#define GIB ((size_t)1 << 30)

/* -- error.c -- */
memferry_status fail(memferry_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Add to the message that `fail` has just left: a refused undo never hides what it was for. */
void fail_more(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* A size as people read it; the buffer is the caller's. */
typedef struct size_text {
    char text[32];
} size_text;
size_text format_size(size_t nbytes);
#define SIZE(nbytes) (format_size(nbytes).text)

/* -- device.c -- */
struct memferry_device {
    driver *driver;
    int ordinal;
    cu_device handle;
    cu_context context;
    size_t max_chunk;
    pthread_mutex_t lock; /* over the two lists */
    memferry_pool *pools;
    struct arena *arenas;
};

memferry_status require_usable(void); /* MEMFERRY_FORKED in a child */

/* The device's context made current, and driver calls allowed beside other people's captures, until left. */
typedef struct scope {
    const memferry_device *device;
    bool pushed;
    bool relaxed;
    int capture_mode;
} scope;

/* `beside_captures`: for calls that a capture elsewhere would forbid, and that would break it. */
memferry_status scope_enter(scope *self, const memferry_device *device, bool beside_captures);
void scope_leave(scope *self);

/* -- pool.c, for device.c and stream.c -- */
memferry_pool *pool_next(const memferry_pool *pool);

/* -- stream.c -- */
/* MEMFERRY_CAPTURING for a stream that is being captured, else its identity: handles are used again.  `inside` is for
 * the caller to leave; the device's context is current until then only where asking about the stream needs it. */
memferry_status stream_identity(scope *inside, const memferry_device *device, memferry_stream *stream, const char *call,
                                unsigned long long *identity);

/* -- registration.c -- */
registration_map *registration_map_create(void);
void registration_totals(registration_map *map, size_t *nbytes, size_t *count);

#endif

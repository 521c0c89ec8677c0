/* Streams: who one is, whether it is being captured, and a few calls for programs that have none of their own. */
#include "internal.h"

/* Whether a stream is being captured, and its identity. */
static cu_result look_at(const driver *cu, memferry_stream stream, int *capturing, unsigned long long *identity)
{
    *capturing = 0;
    *identity = 0; /* the legacy stream's: there is one of it */
    cu_result code = cu->stream_capturing(stream, capturing);
    return code == CU_OK && *capturing == 0 && stream != NULL ? cu->stream_id(stream, identity) : code;
}

memferry_status stream_identity(scope *inside, const memferry_device *device, memferry_stream *stream, const char *call,
                                unsigned long long *identity)
{
    const driver *cu = device->driver;
    *inside = (scope){.device = device};
    if (*stream == CU_STREAM_PER_THREAD)
        return fail(MEMFERRY_UNSUPPORTED,
                    "%s: the per-thread default stream is another one in every thread; pass a created stream", call);
    if (*stream == CU_STREAM_LEGACY)
        *stream = NULL;
    int capturing = 0;
    memferry_status status = MEMFERRY_OK;
    cu_result code = CU_INVALID_CONTEXT;
    if (*stream != NULL) /* a created stream has a context of its own */
        code = look_at(cu, *stream, &capturing, identity);
    if (code == CU_INVALID_CONTEXT) {
        status = scope_enter(inside, device, false);
        if (status != MEMFERRY_OK)
            return status;
        code = look_at(cu, *stream, &capturing, identity);
    }
    if (code == CU_CAPTURE_IMPLICIT || (code == CU_OK && capturing != 0))
        status = fail(MEMFERRY_CAPTURING,
                      "%s: stream %p is being captured into a graph, and a graph would keep the memory; allocate and free "
                      "before or after the capture",
                      call, *stream);
    else if (code != CU_OK)
        status = driver_refused(cu, code, call, "stream %p; it is closed, or of another device", *stream);
    if (status != MEMFERRY_OK)
        scope_leave(inside);
    return status;
}

static memferry_status begin(scope *inside, memferry_device *device, const char *call)
{
    memferry_status status = require_usable();
    if (status != MEMFERRY_OK)
        return status;
    if (device == NULL)
        return fail(MEMFERRY_INVALID, "%s: the device is NULL; open one with memferry_open", call);
    return scope_enter(inside, device, true);
}

static memferry_status finish(scope *inside, cu_result code, const char *call, memferry_stream stream)
{
    const driver *cu = inside->device->driver;
    scope_leave(inside);
    return code == CU_OK ? MEMFERRY_OK : driver_refused(cu, code, call, "stream %p", stream);
}

memferry_status memferry_stream_create(memferry_device *device, memferry_stream *stream)
{
    if (stream == NULL)
        return fail(MEMFERRY_INVALID, "stream create: there is nowhere to put the stream");
    scope inside;
    memferry_status status = begin(&inside, device, "stream create");
    if (status != MEMFERRY_OK)
        return status;
    return finish(&inside, device->driver->stream_create(stream, CU_STREAM_NON_BLOCKING), "stream create", NULL);
}

memferry_status memferry_stream_synchronize(memferry_device *device, memferry_stream stream)
{
    scope inside;
    memferry_status status = begin(&inside, device, "stream synchronize");
    if (status != MEMFERRY_OK)
        return status;
    return finish(&inside, device->driver->stream_synchronize(stream), "stream synchronize", stream);
}

memferry_status memferry_stream_destroy(memferry_device *device, memferry_stream stream)
{
    scope inside;
    memferry_status status = begin(&inside, device, "stream destroy");
    if (status != MEMFERRY_OK)
        return status;
    cu_result code = device->driver->stream_synchronize(stream); /* so that nothing below blocks under the lock */
    if (code != CU_OK)
        return finish(&inside, code, "stream destroy", stream);
    pthread_mutex_lock(&device->lock);
    for (memferry_pool *pool = device->pools; pool != NULL && status == MEMFERRY_OK; pool = pool_next(pool))
        status = memferry_pool_forget_stream(pool, stream);
    pthread_mutex_unlock(&device->lock);
    if (status != MEMFERRY_OK) {
        scope_leave(&inside);
        return status;
    }
    return finish(&inside, device->driver->stream_destroy(stream), "stream destroy", stream);
}

memferry_status memferry_copy(memferry_device *device, uint64_t destination, uint64_t source, size_t nbytes,
                              memferry_stream stream)
{
    if (nbytes == 0)
        return require_usable();
    memferry_status status = require_usable();
    if (status != MEMFERRY_OK)
        return status;
    if (device == NULL)
        return fail(MEMFERRY_INVALID, "copy: the device is NULL; open one with memferry_open");
    scope inside;
    status = scope_enter(&inside, device, false);
    if (status != MEMFERRY_OK)
        return status;
    cu_result code = device->driver->copy(destination, source, nbytes, stream);
    scope_leave(&inside);
    if (code != CU_OK)
        return driver_refused(device->driver, code, "copy",
                              "%zu bytes from %#llx to %#llx; a range leaves its allocation or crosses the edge of a "
                              "registration (memferry_host_range has the edges)",
                              nbytes, (unsigned long long)source, (unsigned long long)destination);
    return MEMFERRY_OK;
}

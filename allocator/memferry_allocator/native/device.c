/* Devices: opening, closing, making one's context current, and the guard against fork. */
#include <stdlib.h>

#include "internal.h"

static pthread_once_t guarded = PTHREAD_ONCE_INIT;
static volatile int forked;

static void mark_forked(void)
{
    forked = 1;
}

static void guard_forks(void)
{
    pthread_atfork(NULL, NULL, mark_forked);
}

memferry_status require_usable(void)
{
    if (forked)
        return fail(MEMFERRY_FORKED, "this process is a child of the one that opened the device; start workers "
                                     "without fork, or open devices after it only");
    return MEMFERRY_OK;
}

memferry_status scope_enter(scope *self, const memferry_device *device, bool beside_captures)
{
    *self = (scope){.device = device};
    const driver *cu = device->driver;
    cu_context current = NULL;
    cu_result code = cu->context_current(&current);
    if (code != CU_OK || current != device->context) {
        code = cu->context_push(device->context);
        if (code != CU_OK)
            return driver_refused(cu, code, "make context current", "device %d", device->ordinal);
        self->pushed = true;
    }
    if (beside_captures) {
        self->capture_mode = CU_CAPTURE_MODE_RELAXED;
        code = cu->capture_mode(&self->capture_mode);
        if (code != CU_OK) {
            scope_leave(self);
            return driver_refused(cu, code, "capture mode", "device %d", device->ordinal);
        }
        self->relaxed = true;
    }
    return MEMFERRY_OK;
}

void scope_leave(scope *self)
{
    const driver *cu = self->device->driver;
    cu_context dropped;
    if (self->relaxed)
        cu->capture_mode(&self->capture_mode);
    if (self->pushed)
        cu->context_pop(&dropped);
}

static memferry_status retain(memferry_device *self)
{
    const driver *cu = self->driver;
    int count = 0;
    cu_result code = cu->init(0);
    if (code == CU_OK)
        code = cu->device_count(&count);
    if (code != CU_OK)
        return driver_refused(cu, code, "open", "the driver does not start");
    if (self->ordinal < 0 || self->ordinal >= count)
        return fail(MEMFERRY_NO_DEVICE, "open: asked for device %d, the driver has %d; check CUDA_VISIBLE_DEVICES",
                    self->ordinal, count);
    code = cu->device_get(&self->handle, self->ordinal);
    if (code == CU_OK)
        code = cu->context_retain(&self->context, self->handle);
    if (code != CU_OK)
        return driver_refused(cu, code, "open", "device %d", self->ordinal);
    return MEMFERRY_OK;
}

memferry_status memferry_open(int ordinal, const memferry_options *options, memferry_device **device)
{
    memferry_status status = require_usable();
    if (status != MEMFERRY_OK)
        return status;
    if (device == NULL)
        return fail(MEMFERRY_INVALID, "open: there is nowhere to put the device; pass a memferry_device **");
    driver *loaded_driver = NULL;
    status = driver_load(options != NULL ? options->driver_path : NULL, &loaded_driver);
    if (status != MEMFERRY_OK)
        return status;
    memferry_device *self = calloc(1, sizeof *self);
    if (self == NULL)
        return fail(MEMFERRY_OUT_OF_MEMORY, "open: the host has no memory left");
    self->driver = loaded_driver;
    self->ordinal = ordinal;
    self->max_chunk = options != NULL && options->max_chunk != 0 ? options->max_chunk : 64 * GIB;
    status = retain(self);
    if (status != MEMFERRY_OK) {
        free(self);
        return status;
    }
    pthread_mutex_init(&self->lock, NULL);
    pthread_once(&guarded, guard_forks);
    *device = self;
    return MEMFERRY_OK;
}

memferry_status memferry_close(memferry_device **device)
{
    if (device == NULL || *device == NULL)
        return MEMFERRY_OK;
    memferry_status status = require_usable();
    if (status != MEMFERRY_OK)
        return status;
    memferry_device *self = *device;
    pthread_mutex_lock(&self->lock);
    bool pools = self->pools != NULL, arenas = self->arenas != NULL;
    pthread_mutex_unlock(&self->lock);
    if (pools || arenas)
        return fail(MEMFERRY_BUSY, "close: device %d still has open %s; close them first", self->ordinal,
                    pools && arenas ? "pools and arenas" : pools ? "pools" : "arenas");
    cu_result code = self->driver->context_release(self->handle);
    if (code != CU_OK)
        return driver_refused(self->driver, code, "close", "device %d", self->ordinal);
    pthread_mutex_destroy(&self->lock);
    free(self);
    *device = NULL;
    return MEMFERRY_OK;
}

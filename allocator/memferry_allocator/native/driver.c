/* Loading the driver library, and what its answers mean. */
#include "driver.h"

#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

static pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER;
static driver *loaded;

static memferry_status resolve(driver *self, const char *path)
{
    static const struct {
        size_t offset;
        const char *symbol;
    } calls[] = {
#define MEMFERRY_ENTRY(name, symbol, parameters) {offsetof(driver, name), symbol},
        MEMFERRY_DRIVER_CALLS(MEMFERRY_ENTRY)
#undef MEMFERRY_ENTRY
    };
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        void *found = dlsym(self->library, calls[i].symbol);
        if (found == NULL)
            return fail(MEMFERRY_NO_DRIVER, "open: %s has no %s; a driver for CUDA 12.0 or newer is needed", path,
                        calls[i].symbol);
        memcpy((char *)self + calls[i].offset, &found, sizeof found);
    }
    return MEMFERRY_OK;
}

static memferry_status load(const char *path, driver **out)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL)
        return fail(MEMFERRY_NO_DRIVER, "open: %s; install the NVIDIA driver, or name its library in MEMFERRY_LIBCUDA",
                    dlerror());
    for (driver *known = loaded; known != NULL; known = known->next)
        if (known->library == library) {
            dlclose(library); /* one reference for each driver is enough */
            *out = known;
            return MEMFERRY_OK;
        }
    driver *self = calloc(1, sizeof *self);
    registration_map *map = registration_map_create();
    memferry_status status = MEMFERRY_OK;
    if (self == NULL || map == NULL) {
        status = fail(MEMFERRY_OUT_OF_MEMORY, "open: the host has no memory left");
    } else {
        self->library = library;
        status = resolve(self, path);
    }
    if (status != MEMFERRY_OK) {
        free(map);
        free(self);
        dlclose(library);
        return status;
    }
    self->registrations = map;
    self->next = loaded;
    loaded = self;
    *out = self;
    return MEMFERRY_OK;
}

memferry_status driver_load(const char *path, driver **out)
{
    if (path == NULL)
        path = getenv("MEMFERRY_LIBCUDA");
    if (path == NULL || *path == '\0')
        path = "libcuda.so.1";
    pthread_mutex_lock(&loading);
    memferry_status status = load(path, out);
    pthread_mutex_unlock(&loading);
    return status;
}

static memferry_status status_of(cu_result code)
{
    switch (code) {
    case CU_OK: return MEMFERRY_OK;
    case CU_OUT_OF_MEMORY: return MEMFERRY_OUT_OF_MEMORY;
    case CU_NO_DEVICE:
    case 101: return MEMFERRY_NO_DEVICE;
    case CU_ALREADY_REGISTERED: return MEMFERRY_ALREADY_REGISTERED;
    case CU_NOT_REGISTERED: return MEMFERRY_NOT_REGISTERED;
    case 801: return MEMFERRY_UNSUPPORTED;
    case 4:   /* deinitialised */
    case 201: /* invalid context */
    case 214: /* uncorrectable memory error */
    case 220: /* uncorrectable link error */
    case 226: /* contained error */
    case 700: /* illegal address */
    case 702: /* launch timeout */
    case 709: /* context destroyed */
    case 710: /* assertion in a kernel */
    case 714: /* hardware stack error, and the kernel faults after it */
    case 715:
    case 716:
    case 717:
    case 718:
    case 719: return MEMFERRY_DEVICE_LOST;
    default:
        return code >= CU_CAPTURE_FIRST && code <= CU_CAPTURE_LAST ? MEMFERRY_CAPTURING : MEMFERRY_DRIVER;
    }
}

static const char *hint_of(memferry_status status)
{
    switch (status) {
    case MEMFERRY_NO_DEVICE: return "; check CUDA_VISIBLE_DEVICES";
    case MEMFERRY_DEVICE_LOST: return "; every handle of this device is dead: restart the process";
    case MEMFERRY_CAPTURING: return "; do it before or after the capture";
    case MEMFERRY_ALREADY_REGISTERED:
        return "; another library holds a part of the range, or an owner unmapped it without unregistering";
    default: return "";
    }
}

memferry_status driver_refused(const driver *self, cu_result code, const char *call, const char *detail, ...)
{
    const char *name = NULL;
    if (self->error_name(code, &name) != CU_OK || name == NULL)
        name = "an unknown answer";
    char text[512];
    va_list arguments;
    va_start(arguments, detail);
    vsnprintf(text, sizeof text, detail, arguments);
    va_end(arguments);
    memferry_status status = status_of(code);
    return fail(status, "%s: %s (%d); %s%s", call, name, code, text, hint_of(status));
}

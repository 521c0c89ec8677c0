/* The driver calls that libmemferry makes, resolved at run time: no CUDA header or library is needed to build. */
#ifndef MEMFERRY_DRIVER_H
#define MEMFERRY_DRIVER_H

#include <pthread.h>

#include "memferry.h"

typedef int cu_result;
typedef int cu_device;
typedef void *cu_context;
typedef void *cu_event;

enum {
    CU_OK = 0,
    CU_INVALID_VALUE = 1,
    CU_OUT_OF_MEMORY = 2,
    CU_NO_DEVICE = 100,
    CU_INVALID_CONTEXT = 201,
    CU_ALREADY_REGISTERED = 712,
    CU_NOT_REGISTERED = 713,
    CU_CAPTURE_FIRST = 900,
    CU_CAPTURE_IMPLICIT = 906,
    CU_CAPTURE_LAST = 908
};
enum { CU_CAPTURE_MODE_RELAXED = 2 };
enum { CU_STREAM_NON_BLOCKING = 1, CU_EVENT_DISABLE_TIMING = 2 };
enum { CU_REGISTER_PORTABLE = 1, CU_REGISTER_MAPPED = 2, CU_REGISTER_READ_ONLY = 8 };
#define CU_STREAM_LEGACY ((memferry_stream)1)
#define CU_STREAM_PER_THREAD ((memferry_stream)2)

/* X(field, symbol, parameters) */
#define MEMFERRY_DRIVER_CALLS(X)                                                                                 \
    X(init, "cuInit", (unsigned))                                                                                \
    X(device_count, "cuDeviceGetCount", (int *))                                                                 \
    X(device_get, "cuDeviceGet", (cu_device *, int))                                                             \
    X(error_name, "cuGetErrorName", (cu_result, const char **))                                                  \
    X(context_retain, "cuDevicePrimaryCtxRetain", (cu_context *, cu_device))                                     \
    X(context_release, "cuDevicePrimaryCtxRelease_v2", (cu_device))                                              \
    X(context_current, "cuCtxGetCurrent", (cu_context *))                                                        \
    X(context_push, "cuCtxPushCurrent_v2", (cu_context))                                                         \
    X(context_pop, "cuCtxPopCurrent_v2", (cu_context *))                                                         \
    X(synchronize, "cuCtxSynchronize", (void))                                                                   \
    X(memory_info, "cuMemGetInfo_v2", (size_t *, size_t *))                                                      \
    X(memory_allocate, "cuMemAlloc_v2", (memferry_ptr *, size_t))                                                \
    X(memory_free, "cuMemFree_v2", (memferry_ptr))                                                               \
    X(host_register, "cuMemHostRegister_v2", (void *, size_t, unsigned))                                         \
    X(host_unregister, "cuMemHostUnregister", (void *))                                                          \
    X(host_pointer, "cuMemHostGetDevicePointer_v2", (memferry_ptr *, void *, unsigned))                          \
    X(copy, "cuMemcpyAsync", (memferry_ptr, memferry_ptr, size_t, memferry_stream))                              \
    X(stream_create, "cuStreamCreate", (memferry_stream *, unsigned))                                            \
    X(stream_destroy, "cuStreamDestroy_v2", (memferry_stream))                                                   \
    X(stream_synchronize, "cuStreamSynchronize", (memferry_stream))                                              \
    X(stream_wait, "cuStreamWaitEvent", (memferry_stream, cu_event, unsigned))                                   \
    X(stream_capturing, "cuStreamIsCapturing", (memferry_stream, int *))                                         \
    X(stream_id, "cuStreamGetId", (memferry_stream, unsigned long long *))                                       \
    X(capture_mode, "cuThreadExchangeStreamCaptureMode", (int *))                                                \
    X(event_create, "cuEventCreate", (cu_event *, unsigned))                                                     \
    X(event_destroy, "cuEventDestroy_v2", (cu_event))                                                            \
    X(event_record, "cuEventRecord", (cu_event, memferry_stream))

typedef struct registration_map registration_map;

/* One loaded driver library.  It stays loaded: a driver that was initialised cannot be unloaded. */
typedef struct driver {
    struct driver *next;
    void *library;
    registration_map *registrations; /* one for the process: registrations belong to it */
#define MEMFERRY_FIELD(name, symbol, parameters) cu_result(*name) parameters;
    MEMFERRY_DRIVER_CALLS(MEMFERRY_FIELD)
#undef MEMFERRY_FIELD
} driver;

memferry_status driver_load(const char *path, driver **out);

/* The status for a driver's answer, with a message of "call: name; detail". */
memferry_status driver_refused(const driver *self, cu_result code, const char *call, const char *detail, ...)
    __attribute__((format(printf, 4, 5)));

#endif

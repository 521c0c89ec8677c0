/* MemFerry for C and C++: a device pool, registered host memory and pinned arenas, without Python.
 *
 * Every call gives a status; MEMFERRY_OK is 0.  A call that fails has changed nothing unless it says so, and
 * memferry_last_error() tells this thread what was asked, what was found and what to do.  All calls are
 * thread-safe, but for closing a handle that another thread is using.  Sizes are bytes.  A stream is the
 * driver's own handle (CUstream, cudaStream_t); NULL is the legacy default stream.  The device's primary
 * context is made current for the length of a call where it is not, and what was current before is put back.
 */
#ifndef MEMFERRY_H
#define MEMFERRY_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define MEMFERRY_API __attribute__((visibility("default")))
#else
#define MEMFERRY_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* -- declarations -- */

typedef enum memferry_status {
    MEMFERRY_OK = 0,
    MEMFERRY_INVALID = 1,            /* an argument cannot be honoured: freed twice, foreign pointer, ... */
    MEMFERRY_OUT_OF_MEMORY = 2,      /* the budget, the device or the host ran out */
    MEMFERRY_NO_DRIVER = 3,          /* the driver library does not load or lacks a function */
    MEMFERRY_NO_DEVICE = 4,          /* there is no device, or none of that number */
    MEMFERRY_DRIVER = 5,             /* the driver refused; the message has its answer */
    MEMFERRY_DEVICE_LOST = 6,        /* the context is gone or broken: every handle is dead */
    MEMFERRY_UNSUPPORTED = 7,        /* not with this driver, device or kind of stream */
    MEMFERRY_FORKED = 8,             /* a child of the process that opened the device */
    MEMFERRY_CAPTURING = 9,          /* not while a stream is captured into a graph; the capture is unharmed */
    MEMFERRY_ALREADY_REGISTERED = 10, /* part of the range is registered by somebody else */
    MEMFERRY_NOT_REGISTERED = 11,    /* no registration there */
    MEMFERRY_BUSY = 12               /* something is still in use: give it back first */
} memferry_status;

typedef struct memferry_device memferry_device;
typedef struct memferry_pool memferry_pool;
typedef uint64_t memferry_ptr; /* a device pointer, as the driver's CUdeviceptr */
typedef void *memferry_stream;

typedef struct memferry_statistics {
    size_t budget;        /* most bytes that may be allocated */
    size_t reserved;      /* bytes taken from the device now: the budget, or 0 after a trim */
    size_t used;          /* bytes allocated now, alignment included */
    size_t peak;          /* most bytes allocated at once so far */
    size_t cached;        /* free bytes kept aside by exact size; any request may have them */
    size_t largest_free;  /* largest request that fits now */
    uint64_t live;        /* allocations now */
    uint64_t allocations; /* allocations so far, empty ones not counted */
    uint64_t frees;
    uint64_t hits;        /* allocations that an exact size of the same stream served */
    uint64_t waits;       /* waits of a stream for another one's last use */
} memferry_statistics;

typedef struct memferry_host_statistics {
    size_t registered;     /* bytes registered with the driver now, by every device handle of this process */
    size_t registrations;  /* driver registrations that hold them */
    size_t arenas;         /* live memferry_host_allocate of this device handle */
    size_t arena_nbytes;
} memferry_host_statistics;

typedef struct memferry_options {
    const char *driver_path; /* NULL: $MEMFERRY_LIBCUDA, else libcuda.so.1 */
    size_t max_chunk;        /* largest range of one registration call; 0: 64 GiB */
} memferry_options;

/* -- errors and version -- */
MEMFERRY_API const char *memferry_version(void);
/* What a status means, for every status; a constant string. */
MEMFERRY_API const char *memferry_error_text(memferry_status status);
/* The message of this thread's last failed call, empty before one; valid until this thread's next failure. */
MEMFERRY_API const char *memferry_last_error(void);

/* -- devices -- */
/* Load the driver and retain the device's primary context.  `options` may be NULL. */
MEMFERRY_API memferry_status memferry_open(int ordinal, const memferry_options *options, memferry_device **device);
/* Release the context and set *device to NULL; NULL is ignored, so a second close does nothing.
 * MEMFERRY_BUSY while pools or arenas of it are open. */
MEMFERRY_API memferry_status memferry_close(memferry_device **device);

/* -- streams and copies: for programs that have none of their own -- */
MEMFERRY_API memferry_status memferry_stream_create(memferry_device *device, memferry_stream *stream);
MEMFERRY_API memferry_status memferry_stream_synchronize(memferry_device *device, memferry_stream stream);
/* Waits for the stream's work and makes every pool of this device handle forget the stream first. */
MEMFERRY_API memferry_status memferry_stream_destroy(memferry_device *device, memferry_stream stream);
/* Enqueue a copy between device pointers and host addresses; none may cross the edge of a registration. */
MEMFERRY_API memferry_status memferry_copy(memferry_device *device, uint64_t destination, uint64_t source,
                                           size_t nbytes, memferry_stream stream);

/* -- the device pool -- */
/* Reserve exactly `budget` bytes of device memory. */
MEMFERRY_API memferry_status memferry_pool_open(memferry_device *device, size_t budget, memferry_pool **pool);
/* Wait for the device, free the memory and set *pool to NULL; NULL is ignored.  MEMFERRY_BUSY while
 * allocations are live. */
MEMFERRY_API memferry_status memferry_pool_close(memferry_pool **pool);
/* 256-byte aligned memory, usable in the stream's order from now on.  0 bytes give pointer 0.
 * Memory last used on the same stream needs no event; other uses are waited for by an event. */
MEMFERRY_API memferry_status memferry_allocate(memferry_pool *pool, size_t nbytes, memferry_stream stream,
                                               memferry_ptr *pointer);
/* Give memory back; its last use was enqueued on `stream`, which must live until forgotten (below). */
MEMFERRY_API memferry_status memferry_free(memferry_pool *pool, memferry_ptr pointer, size_t nbytes,
                                           memferry_stream stream);
/* `stream` uses the allocation too: after memferry_free it is reused behind that stream's work as well. */
MEMFERRY_API memferry_status memferry_record_use(memferry_pool *pool, memferry_ptr pointer, memferry_stream stream);
/* Before a stream that memory was freed on is destroyed: wait for its work, and hold on to it no longer. */
MEMFERRY_API memferry_status memferry_pool_forget_stream(memferry_pool *pool, memferry_stream stream);
/* Join all free memory.  Where nothing is allocated, wait for the device and give all memory back to it; the
 * next allocation reserves it again.  `released` (may be NULL) gets the bytes that went back. */
MEMFERRY_API memferry_status memferry_pool_trim(memferry_pool *pool, size_t *released);
MEMFERRY_API memferry_status memferry_pool_statistics(memferry_pool *pool, memferry_statistics *statistics);

/* -- host memory -- */
enum { MEMFERRY_READ_ONLY = 1 };
/* Pin and map host memory, whole or not at all.  What is registered through this library already is counted
 * and not registered again.  The owner unregisters before it unmaps.  0 bytes need no driver call. */
MEMFERRY_API memferry_status memferry_host_register(memferry_device *device, const void *address, size_t nbytes,
                                                    int flags);
/* Undo one memferry_host_register of exactly this range; work on it must be over.  If the driver refuses a
 * part, call again once the reason is gone. */
MEMFERRY_API memferry_status memferry_host_unregister(memferry_device *device, const void *address, size_t nbytes);
/* The pointer by which kernels reach registered host memory; it need not equal the address. */
MEMFERRY_API memferry_status memferry_host_device_pointer(memferry_device *device, const void *address,
                                                          memferry_ptr *pointer);
/* The driver registration made here that holds `address`: cut copies where it ends. */
MEMFERRY_API memferry_status memferry_host_range(memferry_device *device, const void *address, void **start,
                                                 size_t *nbytes);
/* Pinned memory of the exact size in whole pages: huge pages asked for, resident, registered, zero. */
MEMFERRY_API memferry_status memferry_host_allocate(memferry_device *device, size_t nbytes, void **address);
/* Give it back; work on it must be over.  NULL is ignored. */
MEMFERRY_API memferry_status memferry_host_free(memferry_device *device, void *address);
MEMFERRY_API memferry_status memferry_host_statistics_get(memferry_device *device,
                                                          memferry_host_statistics *statistics);

/* -- end of declarations -- */

#ifdef __cplusplus
}
#endif
#endif

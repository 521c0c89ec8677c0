/* The calls of libcuda that libmemferry makes, in host memory, for tests on machines without a GPU.
 *
 * Answers to misuse are those of an H200 (tests/allocator/data/driver_answers.json).  Copies run at once.  What
 * orders streams is written to a log, which tests check.  Faults are set with stub_fail or in the environment:
 * STUB_FAIL="cuMemAlloc_v2:2" makes every such call answer 2.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int result;
typedef unsigned long long address;
enum { OK, INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED };
enum { INVALID_DEVICE = 101, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, ALREADY_REGISTERED = 712 };
enum { NOT_REGISTERED = 713, CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901 };
enum { MOST = 1 << 14, MOST_LOG = 1 << 20, LEGACY = 0 };

typedef struct range {
    uintptr_t start, end;
    int live;
} range;

typedef struct stream {
    struct stream *next; /* all there ever were: a use after the end is told, and is no leak */
    unsigned long long id;
    int live, capturing, mode, invalid;
    pthread_t capturer;
} stream;

typedef struct event {
    int live, number;
} event;

typedef struct fault {
    char call[48];
    int after, code;
} fault;

struct entry {
    int kind, stream, event; /* 0: event recorded on stream; 1: stream waits for event */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static range allocations[MOST], registrations[MOST];
static int allocation_count, registration_count, event_count, retained, fault_count;
static size_t capacity = (size_t)1 << 30, used, mapped_offset;
static unsigned long long stream_ids = 1;
static stream *capturing, *streams;
static fault faults[16];
static struct entry log_entries[MOST_LOG];
static int log_count;
static int started, forked, counting, strict;
static const char *environment; /* STUB_FAIL, read once */
static long calls;
static _Thread_local void *contexts[32];
static _Thread_local int depth, exchanged_mode;
static char primary[2];

/* -- for tests -- */
void stub_reset(void)
{
    pthread_mutex_lock(&lock);
    fault_count = log_count = strict = 0;
    capacity = (size_t)1 << 30;
    mapped_offset = 0;
    pthread_mutex_unlock(&lock);
}
void stub_fail(const char *call, int after, int code)
{
    snprintf(faults[fault_count].call, sizeof faults[0].call, "%s", call);
    faults[fault_count].after = after;
    faults[fault_count++].code = code;
}
void stub_capacity(size_t nbytes) { capacity = nbytes; }
void stub_mapped_offset(size_t nbytes) { mapped_offset = nbytes; }
size_t stub_used(void) { return used; }
void stub_strict_streams(int on) { strict = on; } /* asking about one needs a current context too */
void stub_count_calls(int on) { counting = on; }
long stub_calls(void) { return calls; }
int stub_contexts(void) { return retained; }
int stub_depth(void) { return depth; }
int stub_events(void) { return event_count; }
int stub_registrations(void)
{
    int count = 0;
    for (int i = 0; i < registration_count; i++)
        count += registrations[i].live;
    return count;
}
int stub_log(const struct entry **entries)
{
    *entries = log_entries;
    return log_count;
}

static int fails(const char *call)
{
    if (counting)
        __atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED);
    if (forked)
        return NOT_INITIALIZED;
    if (fault_count == 0 && environment == NULL)
        return OK;
    for (int i = 0; i < fault_count; i++)
        if (strcmp(faults[i].call, call) == 0 && faults[i].after-- == 0) {
            int code = faults[i].code;
            faults[i] = faults[--fault_count];
            return code;
        }
    size_t length = strlen(call);
    if (environment != NULL && strncmp(environment, call, length) == 0 && environment[length] == ':')
        return atoi(environment + length + 1);
    return OK;
}

#define ENTER(call)                                                                                              \
    int fault = fails(call);                                                                                     \
    if (fault != OK)                                                                                             \
        return fault;
#define ENTER_CONTEXT(call)                                                                                      \
    ENTER(call)                                                                                                  \
    if (depth == 0)                                                                                              \
        return INVALID_CONTEXT;

#define ENTER_STREAM(call, on)                                                                                   \
    ENTER(call)                                                                                                  \
    if (depth == 0 && (strict || (uintptr_t)(on) <= 2))                                                          \
        return INVALID_CONTEXT;

/* What a capture forbids: to everybody in the global mode, to its own thread in the next, unless relaxed. */
static int forbidden(void)
{
    if (capturing == NULL || capturing->mode == 2 || exchanged_mode == 2)
        return 0;
    if (capturing->mode == 1 && !pthread_equal(capturing->capturer, pthread_self()))
        return 0;
    capturing->invalid = 1;
    return CAPTURE_UNSUPPORTED;
}
#define NOT_IN_CAPTURE                                                                                           \
    if (forbidden())                                                                                             \
        return CAPTURE_UNSUPPORTED;

static void in_child(void) { forked = 1; }

/* -- device and context -- */
result cuInit(unsigned flags)
{
    (void)flags;
    ENTER("cuInit")
    if (!started)
        pthread_atfork(NULL, NULL, in_child);
    environment = getenv("STUB_FAIL");
    started = 1;
    return OK;
}
result cuDeviceGetCount(int *count)
{
    ENTER("cuDeviceGetCount")
    *count = 2;
    return OK;
}
result cuDeviceGet(int *device, int ordinal)
{
    ENTER("cuDeviceGet")
    *device = ordinal;
    return ordinal >= 0 && ordinal < 2 ? OK : INVALID_DEVICE;
}
result cuGetErrorName(int code, const char **name)
{
    static const struct {
        int code;
        const char *name;
    } names[] = {{0, "CUDA_SUCCESS"}, {1, "CUDA_ERROR_INVALID_VALUE"}, {2, "CUDA_ERROR_OUT_OF_MEMORY"},
                 {3, "CUDA_ERROR_NOT_INITIALIZED"}, {304, "CUDA_ERROR_OPERATING_SYSTEM"},
                 {400, "CUDA_ERROR_INVALID_HANDLE"}, {700, "CUDA_ERROR_ILLEGAL_ADDRESS"},
                 {712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"}, {713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"},
                 {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"}, {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].code == code) {
            *name = names[i].name;
            return OK;
        }
    return INVALID_VALUE;
}
result cuDevicePrimaryCtxRetain(void **context, int device)
{
    ENTER("cuDevicePrimaryCtxRetain")
    *context = &primary[device];
    retained++;
    return OK;
}
result cuDevicePrimaryCtxRelease_v2(int device)
{
    (void)device;
    ENTER("cuDevicePrimaryCtxRelease_v2")
    retained--;
    return OK;
}
result cuCtxGetCurrent(void **context)
{
    ENTER("cuCtxGetCurrent")
    *context = depth > 0 ? contexts[depth - 1] : NULL;
    return OK;
}
result cuCtxPushCurrent_v2(void *context)
{
    ENTER("cuCtxPushCurrent_v2")
    contexts[depth++] = context;
    return OK;
}
result cuCtxPopCurrent_v2(void **context)
{
    if (depth == 0)
        return INVALID_CONTEXT;
    *context = contexts[--depth];
    return OK;
}
result cuCtxSynchronize(void)
{
    ENTER_CONTEXT("cuCtxSynchronize")
    NOT_IN_CAPTURE
    return OK;
}

/* -- ranges -- */
static range *holding(range *list, int count, uintptr_t start, uintptr_t end)
{
    for (int i = 0; i < count; i++)
        if (list[i].live && list[i].start < end && start < list[i].end)
            return &list[i];
    return NULL;
}
static result add(range *list, int *count, uintptr_t start, uintptr_t end)
{
    int at = 0;
    while (at < *count && list[at].live)
        at++;
    if (at == MOST)
        return OUT_OF_MEMORY;
    *count += at == *count;
    list[at] = (range){start, end, 1};
    return OK;
}

/* -- device memory -- */
result cuMemGetInfo_v2(size_t *left, size_t *total)
{
    ENTER_CONTEXT("cuMemGetInfo_v2")
    *left = capacity - used;
    *total = capacity;
    return OK;
}
result cuMemAlloc_v2(address *pointer, size_t nbytes)
{
    ENTER_CONTEXT("cuMemAlloc_v2")
    NOT_IN_CAPTURE
    if (nbytes == 0)
        return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    result code = OUT_OF_MEMORY;
    void *memory = NULL;
    if (nbytes <= capacity - used && posix_memalign(&memory, 512, nbytes) == 0) {
        code = add(allocations, &allocation_count, (uintptr_t)memory, (uintptr_t)memory + nbytes);
        used += nbytes;
        *pointer = (uintptr_t)memory;
    }
    pthread_mutex_unlock(&lock);
    return code;
}
result cuMemFree_v2(address pointer)
{
    ENTER_CONTEXT("cuMemFree_v2")
    NOT_IN_CAPTURE
    if (pointer == 0)
        return OK;
    pthread_mutex_lock(&lock);
    range *held = holding(allocations, allocation_count, (uintptr_t)pointer, (uintptr_t)pointer + 1);
    result code = held != NULL && held->start == pointer ? OK : INVALID_VALUE;
    if (code == OK) {
        held->live = 0;
        used -= held->end - held->start;
        free((void *)held->start);
    }
    pthread_mutex_unlock(&lock);
    return code;
}

/* -- registered memory -- */
static int mapped(uintptr_t start, uintptr_t end, int write)
{
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[512], rights[8];
    unsigned long from, to;
    while (start < end && fgets(line, sizeof line, maps) != NULL)
        if (sscanf(line, "%lx-%lx %4s", &from, &to, rights) == 3 && from <= start && start < to &&
            rights[0] == 'r' && (!write || rights[1] == 'w'))
            start = to;
    fclose(maps);
    return start >= end;
}
result cuMemHostRegister_v2(void *start, size_t nbytes, unsigned flags)
{
    ENTER_CONTEXT("cuMemHostRegister_v2")
    NOT_IN_CAPTURE
    uintptr_t from = (uintptr_t)start, to = from + nbytes;
    if (start == NULL || nbytes == 0 || !mapped(from, to, (flags & 8) == 0))
        return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    result code = holding(registrations, registration_count, from, to) != NULL
                      ? ALREADY_REGISTERED
                      : add(registrations, &registration_count, from, to);
    pthread_mutex_unlock(&lock);
    return code;
}
result cuMemHostUnregister(void *start)
{
    ENTER_CONTEXT("cuMemHostUnregister")
    NOT_IN_CAPTURE
    uintptr_t from = (uintptr_t)start;
    pthread_mutex_lock(&lock);
    range *held = holding(registrations, registration_count, from, from + 1);
    result code = held == NULL ? NOT_REGISTERED : held->start == from ? OK : INVALID_VALUE;
    if (code == OK)
        held->live = 0;
    pthread_mutex_unlock(&lock);
    return code;
}
result cuMemHostGetDevicePointer_v2(address *pointer, void *host, unsigned flags)
{
    (void)flags;
    ENTER_CONTEXT("cuMemHostGetDevicePointer_v2")
    uintptr_t at = (uintptr_t)host;
    pthread_mutex_lock(&lock);
    int known = holding(registrations, registration_count, at, at + 1) != NULL;
    pthread_mutex_unlock(&lock);
    *pointer = at + mapped_offset;
    return known ? OK : INVALID_VALUE;
}

/* The host memory behind one side of a copy; 0 where it leaves what holds its first byte. */
static uintptr_t behind(address at, size_t nbytes)
{
    uintptr_t start = (uintptr_t)at;
    range *held = holding(allocations, allocation_count, start, start + 1);
    if (held == NULL)
        held = holding(registrations, registration_count, start, start + 1);
    if (held == NULL && mapped_offset != 0) {
        start -= mapped_offset;
        held = holding(registrations, registration_count, start, start + 1);
        start = held != NULL ? start : (uintptr_t)at;
    }
    if (held == NULL) /* pageable memory, unless it runs into a registration */
        return holding(registrations, registration_count, start, start + nbytes) == NULL ? start : 0;
    return start + nbytes <= held->end ? start : 0;
}
result cuMemcpyAsync(address destination, address source, size_t nbytes, stream *on)
{
    (void)on;
    ENTER_CONTEXT("cuMemcpyAsync")
    pthread_mutex_lock(&lock);
    uintptr_t to = behind(destination, nbytes), from = behind(source, nbytes);
    pthread_mutex_unlock(&lock);
    if (nbytes != 0 && (to == 0 || from == 0))
        return INVALID_VALUE;
    memmove((void *)to, (void *)from, nbytes);
    return OK;
}

/* -- streams and events -- */
static int number_of(const stream *on) { return (uintptr_t)on <= 1 ? LEGACY : (int)on->id; }

result cuStreamCreate(stream **out, unsigned flags)
{
    (void)flags;
    ENTER_CONTEXT("cuStreamCreate")
    *out = calloc(1, sizeof **out);
    (*out)->live = 1;
    pthread_mutex_lock(&lock);
    (*out)->id = ++stream_ids;
    (*out)->next = streams;
    streams = *out;
    pthread_mutex_unlock(&lock);
    return OK;
}
/* For tests: another stream under the handle of one that is gone. */
void stub_reuse_handle(stream *gone)
{
    *gone = (stream){.next = gone->next, .id = ++stream_ids, .live = 1};
}
result cuStreamDestroy_v2(stream *on)
{
    ENTER_CONTEXT("cuStreamDestroy_v2")
    if ((uintptr_t)on <= 2 || !on->live)
        return INVALID_HANDLE;
    on->live = 0;
    return OK;
}
result cuStreamSynchronize(stream *on)
{
    ENTER_CONTEXT("cuStreamSynchronize")
    return (uintptr_t)on > 2 && !on->live ? INVALID_HANDLE : OK;
}
result cuStreamGetId(stream *on, unsigned long long *id)
{
    ENTER_STREAM("cuStreamGetId", on)
    *id = (uintptr_t)on <= 2 ? 1 : on->id;
    return (uintptr_t)on > 2 && !on->live ? INVALID_HANDLE : OK;
}
result cuStreamIsCapturing(stream *on, int *status)
{
    ENTER_STREAM("cuStreamIsCapturing", on)
    *status = (uintptr_t)on <= 2 ? 0 : on->capturing;
    return (uintptr_t)on > 2 && !on->live ? INVALID_HANDLE : OK;
}
result cuStreamBeginCapture_v2(stream *on, int mode)
{
    ENTER_CONTEXT("cuStreamBeginCapture_v2")
    on->capturing = 1;
    on->mode = mode;
    on->invalid = 0;
    on->capturer = pthread_self();
    capturing = on;
    return OK;
}
result cuStreamEndCapture(stream *on, void **graph)
{
    ENTER_CONTEXT("cuStreamEndCapture")
    *graph = NULL;
    on->capturing = 0;
    capturing = NULL;
    return on->invalid ? CAPTURE_INVALIDATED : OK;
}
result cuThreadExchangeStreamCaptureMode(int *mode)
{
    ENTER("cuThreadExchangeStreamCaptureMode")
    int before = exchanged_mode;
    exchanged_mode = *mode;
    *mode = before;
    return OK;
}

static void note(int kind, const stream *on, const event *what)
{
    pthread_mutex_lock(&lock);
    if (log_count < MOST_LOG)
        log_entries[log_count++] = (struct entry){kind, number_of(on), what->number};
    pthread_mutex_unlock(&lock);
}
result cuEventCreate(event **out, unsigned flags)
{
    (void)flags;
    static int numbers;
    ENTER_CONTEXT("cuEventCreate")
    *out = calloc(1, sizeof **out);
    (*out)->live = 1;
    (*out)->number = __atomic_add_fetch(&numbers, 1, __ATOMIC_RELAXED);
    __atomic_add_fetch(&event_count, 1, __ATOMIC_RELAXED);
    return OK;
}
result cuEventDestroy_v2(event *what)
{
    ENTER_CONTEXT("cuEventDestroy_v2")
    free(what);
    __atomic_sub_fetch(&event_count, 1, __ATOMIC_RELAXED);
    return OK;
}
result cuEventQuery(event *what)
{
    (void)what;
    ENTER_CONTEXT("cuEventQuery")
    NOT_IN_CAPTURE
    return OK;
}
result cuEventRecord(event *what, stream *on)
{
    ENTER_CONTEXT("cuEventRecord")
    if ((uintptr_t)on > 2 && !on->live)
        return INVALID_HANDLE;
    note(0, on, what);
    return OK;
}
result cuStreamWaitEvent(stream *on, event *what, unsigned flags)
{
    (void)flags;
    ENTER_CONTEXT("cuStreamWaitEvent")
    if ((uintptr_t)on > 2 && !on->live)
        return INVALID_HANDLE;
    note(1, on, what);
    return OK;
}

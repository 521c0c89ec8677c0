#include "users.h"

int users_known(const users *self, memferry_stream handle)
{
    for (int i = 0; i < self->count; i++)
        if (self->list[i].known && self->list[i].handle == handle)
            return i;
    return -1;
}

int users_find(users *self, memferry_stream handle, unsigned long long identity, int *stale)
{
    const user *last = &self->list[self->last];
    int found = last->known && last->handle == handle ? self->last : users_known(self, handle);
    if (found >= 0 && self->list[found].identity != identity) {
        *stale = found;
        return USERS_STALE;
    }
    if (found < 0) {
        for (found = 0; found < self->count && self->list[found].known; found++)
            continue;
        if (found == RANGES_STREAMS)
            return USERS_FULL;
        self->count = found == self->count ? found + 1 : self->count;
        self->list[found] = (user){.known = true, .handle = handle, .identity = identity};
    }
    return self->last = found;
}

void users_drop(users *self, const driver *cu, int number)
{
    if (self->list[number].event != NULL)
        cu->event_destroy(self->list[number].event);
    self->list[number] = (user){0};
}

/* Make a user's event cover everything that was freed until now. */
static memferry_status record(user *self, const driver *cu, uint64_t clock)
{
    int capturing = 0;
    cu_result code = cu->stream_capturing(self->handle, &capturing);
    if (code == CU_CAPTURE_IMPLICIT || (code == CU_OK && capturing != 0))
        return fail(MEMFERRY_CAPTURING,
                    "allocate: the memory that is free was last used on stream %p, which is being captured into a graph; "
                    "allocate on that stream's own order, or after the capture",
                    self->handle);
    if (code == CU_OK && self->event == NULL)
        code = cu->event_create(&self->event, CU_EVENT_DISABLE_TIMING);
    if (code == CU_OK)
        code = cu->event_record(self->event, self->handle);
    if (code != CU_OK)
        return driver_refused(cu, code, "allocate",
                              "recording the last use on stream %p; a stream is forgotten "
                              "(memferry_pool_forget_stream) before it is destroyed",
                              self->handle);
    self->recorded = clock;
    return MEMFERRY_OK;
}

memferry_status users_order(users *self, const driver *cu, int number, const block *reused, uint64_t clock,
                            uint64_t *waits)
{
    for (int i = 0; i < self->count; i++) {
        if (i == number || !uses_has(&reused->uses, i))
            continue;
        user *other = &self->list[i];
        if (other->event == NULL || other->recorded < reused->freed) {
            memferry_status status = record(other, cu, clock);
            if (status != MEMFERRY_OK)
                return status;
        }
        cu_result code = cu->stream_wait(self->list[number].handle, other->event, 0);
        if (code != CU_OK)
            return driver_refused(cu, code, "allocate", "waiting for the last use on stream %p", other->handle);
        ++*waits;
    }
    return MEMFERRY_OK;
}

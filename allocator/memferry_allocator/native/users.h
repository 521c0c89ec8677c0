/* The streams that a pool has met, and how one is ordered behind another's last use.  Under the pool's lock. */
#ifndef MEMFERRY_USERS_H
#define MEMFERRY_USERS_H

#include "internal.h"
#include "ranges.h"

typedef struct user {
    bool known;
    memferry_stream handle;
    unsigned long long identity; /* handles are used again for other streams; identities are not */
    cu_event event;
    uint64_t recorded; /* the pool's clock when `event` was recorded last: it covers what was freed until then */
} user;

typedef struct users {
    user list[RANGES_STREAMS];
    int count; /* of `list` that were ever known */
    int last;  /* found last: most calls are of one stream */
} users;

enum { USERS_FULL = -1, USERS_STALE = -2 };

/* The number of a stream, a new one if need be.  USERS_FULL, or USERS_STALE with the number of a destroyed
 * stream that had this handle: the pool settles these and asks again. */
int users_find(users *self, memferry_stream handle, unsigned long long identity, int *stale);
/* The number of a stream that is known under this handle; -1 without one. */
int users_known(const users *self, memferry_stream handle);
void users_drop(users *self, const driver *cu, int number);

/* Order stream `number` behind every use of `reused` by others.  MEMFERRY_CAPTURING where one of them is being
 * captured, and so cannot be waited for. */
memferry_status users_order(users *self, const driver *cu, int number, const block *reused, uint64_t clock,
                            uint64_t *waits);

#endif

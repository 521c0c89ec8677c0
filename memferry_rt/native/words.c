/* Words in memory that several processes map, with the order that a flag needs. */
#include <stdatomic.h>
#include <stdint.h>

#include "words.h"

_Static_assert(sizeof(_Atomic int64_t) == sizeof(int64_t), "a word must be shared without a lock");

int64_t memferry_load_word(const int64_t *word) {
    return atomic_load_explicit((const _Atomic int64_t *)word, memory_order_acquire);
}

void memferry_store_word(int64_t *word, int64_t value) {
    atomic_store_explicit((_Atomic int64_t *)word, value, memory_order_release);
}

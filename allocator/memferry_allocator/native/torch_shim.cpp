// The functions that torch.cuda.memory.CUDAPluggableAllocator wants, on top of libmemferry.
//
// torch passes no data of one's own to them, so there are several sets ("slots"), each with a budget and with a
// pool for every device.  Needs no header of torch.
#include <cstdio>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include <cxxabi.h>
#include <dlfcn.h>

#include "memferry.h"

namespace {

constexpr int devices = 64;
constexpr int slots = 8;

struct Pending {
    memferry_ptr pointer;
    size_t nbytes;
    memferry_stream stream;
};

struct Place { // a pool of one slot on one device
    memferry_device *device = nullptr;
    memferry_pool *pool = nullptr;
    std::vector<Pending> pending; // frees that came during a capture
};

struct Slot {
    std::mutex lock;
    bool taken = false;
    bool null_when_full = false; // torch.cuda.MemPool flushes and retries on null; a global allocator does not
    size_t budget = 0;
    Place places[devices];
};

Slot *slot_of(int number)
{
    static Slot *all = new Slot[slots]; // never destroyed: torch frees its last blocks while the process exits
    return &all[number];
}

// c10::OutOfMemoryError, thrown without its header: by name, from the libraries that torch has loaded.  The class
// adds nothing to c10::Error, whose constructor serves where it has none of its own.  Where a version of torch has
// not got these names, nothing is thrown.
struct SourceLocation {
    const char *function;
    const char *file;
    uint32_t line;
};

void *find_in_torch(const char *symbol)
{
    for (const char *name : {"libc10.so", "libc10_cuda.so", "libtorch_python.so"}) {
        void *library = dlopen(name, RTLD_LAZY | RTLD_NOLOAD);
        void *found = library == nullptr ? nullptr : dlsym(library, symbol);
        if (library != nullptr)
            dlclose(library);
        if (found != nullptr)
            return found;
    }
    return nullptr;
}

void destroy_exception(void *object)
{
    static_cast<std::exception *>(object)->~exception();
}

void throw_as_torch(const std::string &message)
{
#define MEMFERRY_PARAMETERS "ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
    using Construct = void (*)(void *, SourceLocation, std::string);
    auto construct = reinterpret_cast<Construct>(find_in_torch("_ZN3c1016OutOfMemoryErrorC1" MEMFERRY_PARAMETERS));
    if (construct == nullptr)
        construct = reinterpret_cast<Construct>(find_in_torch("_ZN3c105ErrorC1" MEMFERRY_PARAMETERS));
#undef MEMFERRY_PARAMETERS
    auto type = static_cast<std::type_info *>(find_in_torch("_ZTIN3c1016OutOfMemoryErrorE"));
    if (construct == nullptr || type == nullptr)
        return;
    constexpr size_t room = 4096; // several times what any version's object takes
    void *object = abi::__cxa_allocate_exception(room);
    try {
        construct(object, SourceLocation{"memferry_torch_allocate", "torch_shim.cpp", 0}, message);
    } catch (...) {
        abi::__cxa_free_exception(object);
        throw;
    }
    abi::__cxa_throw(object, type, destroy_exception);
}

[[noreturn]] void refuse(memferry_status status, size_t nbytes, int device)
{
    std::string reason = memferry_last_error();
    if (status != MEMFERRY_OUT_OF_MEMORY)
        throw std::runtime_error("MemFerry: " + reason);
    // The first words are those by which trainers know the error.
    std::string message = "CUDA out of memory. Tried to allocate " + std::to_string(nbytes) + " bytes on device " +
                          std::to_string(device) + ". MemFerry: " + reason;
    throw_as_torch(message);
    throw std::runtime_error(message);
}

memferry_status open_place(Slot *slot, Place *place, int device)
{
    memferry_status status = MEMFERRY_OK;
    if (place->device == nullptr)
        status = memferry_open(device, nullptr, &place->device);
    if (status == MEMFERRY_OK && place->pool == nullptr)
        status = memferry_pool_open(place->device, slot->budget, &place->pool);
    return status;
}

void retry_pending(Place *place)
{
    std::vector<Pending> &list = place->pending;
    for (size_t i = list.size(); i-- > 0;)
        if (memferry_free(place->pool, list[i].pointer, list[i].nbytes, list[i].stream) != MEMFERRY_CAPTURING)
            list.erase(list.begin() + static_cast<std::ptrdiff_t>(i));
}

Place *place_of(int number, int device)
{
    return device >= 0 && device < devices ? &slot_of(number)->places[device] : nullptr;
}

void *allocate(int number, size_t nbytes, int device, void *stream)
{
    Slot *slot = slot_of(number);
    Place *place = place_of(number, device);
    if (place == nullptr)
        throw std::runtime_error("MemFerry: device " + std::to_string(device) + " is beyond the " +
                                 std::to_string(devices) + " that the allocator for torch serves");
    if (nbytes == 0)
        return nullptr;
    memferry_ptr pointer = 0;
    memferry_status status;
    {
        std::lock_guard<std::mutex> guard(slot->lock);
        status = open_place(slot, place, device);
        if (status == MEMFERRY_OK && !place->pending.empty())
            retry_pending(place);
    }
    if (status == MEMFERRY_OK)
        status = memferry_allocate(place->pool, nbytes, stream, &pointer);
    if (status == MEMFERRY_OUT_OF_MEMORY && place->pool != nullptr && memferry_pool_trim(place->pool, nullptr) == MEMFERRY_OK)
        status = memferry_allocate(place->pool, nbytes, stream, &pointer);
    if (status == MEMFERRY_OK)
        return reinterpret_cast<void *>(pointer);
    if (status == MEMFERRY_OUT_OF_MEMORY && slot->null_when_full)
        return nullptr;
    refuse(status, nbytes, device);
}

// torch calls this from destructors: nothing may be thrown.
void release(int number, void *pointer, size_t nbytes, int device, void *stream) noexcept
{
    Slot *slot = slot_of(number);
    Place *place = place_of(number, device);
    if (pointer == nullptr || place == nullptr || place->pool == nullptr)
        return;
    memferry_ptr address = reinterpret_cast<memferry_ptr>(pointer);
    memferry_status status = memferry_free(place->pool, address, nbytes, stream);
    if (status == MEMFERRY_CAPTURING) {
        std::lock_guard<std::mutex> guard(slot->lock);
        place->pending.push_back({address, nbytes, stream});
    } else if (status != MEMFERRY_OK && status != MEMFERRY_FORKED) {
        std::fprintf(stderr, "MemFerry: %s\n", memferry_last_error());
    }
}

void record_stream(int number, void *pointer, void *stream)
{
    for (Place &place : slot_of(number)->places) {
        if (place.pool == nullptr || pointer == nullptr)
            continue;
        memferry_status status = memferry_record_use(place.pool, reinterpret_cast<memferry_ptr>(pointer), stream);
        if (status == MEMFERRY_OK)
            return;
        if (status != MEMFERRY_INVALID) // invalid: of another device
            throw std::runtime_error(std::string("MemFerry: ") + memferry_last_error());
    }
}

void trim(int number)
{
    Slot *slot = slot_of(number);
    std::lock_guard<std::mutex> guard(slot->lock);
    for (Place &place : slot->places) {
        if (place.pool == nullptr)
            continue;
        retry_pending(&place);
        if (memferry_pool_trim(place.pool, nullptr) != MEMFERRY_OK)
            throw std::runtime_error(std::string("MemFerry: ") + memferry_last_error());
    }
}

} // namespace

extern "C" {

// Take a free slot with a budget for each device; -1 where all are taken.
MEMFERRY_API int memferry_torch_take(size_t budget, int null_when_full)
{
    for (int number = 0; number < slots; number++) {
        Slot *slot = slot_of(number);
        std::lock_guard<std::mutex> guard(slot->lock);
        if (slot->taken)
            continue;
        slot->taken = true;
        slot->budget = budget;
        slot->null_when_full = null_when_full != 0;
        return number;
    }
    return -1;
}

// All zero where the slot has not been used on the device.
MEMFERRY_API memferry_status memferry_torch_statistics(int number, int device, memferry_statistics *statistics)
{
    *statistics = memferry_statistics();
    statistics->budget = slot_of(number)->budget;
    Place *place = place_of(number, device);
    if (place == nullptr || place->pool == nullptr)
        return MEMFERRY_OK;
    return memferry_pool_statistics(place->pool, statistics);
}

#define MEMFERRY_SLOT(n)                                                                                         \
    MEMFERRY_API void *memferry_torch_allocate_##n(size_t nbytes, int device, void *stream)                      \
    {                                                                                                            \
        return allocate(n, nbytes, device, stream);                                                              \
    }                                                                                                            \
    MEMFERRY_API void memferry_torch_free_##n(void *pointer, size_t nbytes, int device, void *stream)            \
    {                                                                                                            \
        release(n, pointer, nbytes, device, stream);                                                             \
    }                                                                                                            \
    MEMFERRY_API void memferry_torch_record_stream_##n(void *pointer, void *stream)                              \
    {                                                                                                            \
        record_stream(n, pointer, stream);                                                                       \
    }                                                                                                            \
    MEMFERRY_API void memferry_torch_trim_##n(void)                                                              \
    {                                                                                                            \
        trim(n);                                                                                                 \
    }

MEMFERRY_SLOT(0)
MEMFERRY_SLOT(1)
MEMFERRY_SLOT(2)
MEMFERRY_SLOT(3)
MEMFERRY_SLOT(4)
MEMFERRY_SLOT(5)
MEMFERRY_SLOT(6)
MEMFERRY_SLOT(7)

} // extern "C"

// How a failing allocation for torch arrives in C++: with torch's own error where its library is loaded, else with
// a std::runtime_error.  Arguments: the library, and the budget that is asked for twice over.
#include <cstdio>
#include <cstdlib>
#include <stdexcept>

#include <dlfcn.h>

#ifdef WITH_TORCH
#include <c10/util/Exception.h>
#endif

using Take = int (*)(size_t, int);
using Allocate = void *(*)(size_t, int, void *);
using Free = void (*)(void *, size_t, int, void *);

static void attempt(Allocate allocate, size_t nbytes, int device, void *stream)
{
    try {
        std::printf("%s\n", allocate(nbytes, device, stream) == nullptr ? "null" : "memory");
#ifdef WITH_TORCH
    } catch (const c10::OutOfMemoryError &error) {
        std::printf("OutOfMemoryError %s\n", error.what_without_backtrace());
#endif
    } catch (const std::runtime_error &error) {
        std::printf("runtime_error %s\n", error.what());
    }
}

int main(int, char **arguments)
{
    void *library = dlopen(arguments[1], RTLD_NOW);
    size_t budget = static_cast<size_t>(std::atoll(arguments[2]));
    auto take = reinterpret_cast<Take>(dlsym(library, "memferry_torch_take"));
    auto throwing = reinterpret_cast<Allocate>(dlsym(library, "memferry_torch_allocate_0"));
    auto release = reinterpret_cast<Free>(dlsym(library, "memferry_torch_free_0"));
    auto pooled = reinterpret_cast<Allocate>(dlsym(library, "memferry_torch_allocate_1"));
    std::printf("slots %d", take(budget, 0));
    std::printf(" %d\n", take(budget, 1));
    attempt(throwing, 2 * budget, 0, nullptr);
    attempt(throwing, 2 * budget, 0, nullptr); // and again: the first left nothing broken
    attempt(pooled, 2 * budget, 0, nullptr);
    attempt(pooled, 256, 99, nullptr);
    attempt(pooled, 256, 0, reinterpret_cast<void *>(2));
    void *memory = throwing(budget, 0, nullptr);
    attempt(throwing, 1, 0, nullptr);
    release(memory, budget, 0, nullptr);
    attempt(throwing, budget, 0, nullptr);
    attempt(throwing, 0, 0, nullptr);
    return 0;
}

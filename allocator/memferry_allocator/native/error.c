/* Messages: one for each thread, and the words for each status. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "internal.h"

static _Thread_local char message[1024];

memferry_status fail(memferry_status status, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    return status;
}

void fail_more(const char *format, ...)
{
    size_t used = strlen(message);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message + used, sizeof message - used, format, arguments);
    va_end(arguments);
}

size_text format_size(size_t nbytes)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB"};
    size_text result;
    double value = (double)nbytes;
    int unit = 0;
    while (value >= 1024 && unit < 3) {
        value /= 1024;
        unit++;
    }
    snprintf(result.text, sizeof result.text, "%.*f %s", unit == 0 ? 0 : 2, value, units[unit]);
    return result;
}

const char *memferry_version(void)
{
    return MEMFERRY_VERSION_TEXT;
}

const char *memferry_last_error(void)
{
    return message;
}

const char *memferry_error_text(memferry_status status)
{
    switch (status) {
    case MEMFERRY_OK: return "success";
    case MEMFERRY_INVALID: return "an argument cannot be honoured";
    case MEMFERRY_OUT_OF_MEMORY: return "out of memory";
    case MEMFERRY_NO_DRIVER: return "the CUDA driver library does not load";
    case MEMFERRY_NO_DEVICE: return "no such device";
    case MEMFERRY_DRIVER: return "the driver refused the call";
    case MEMFERRY_DEVICE_LOST: return "the device's context is gone";
    case MEMFERRY_UNSUPPORTED: return "not supported here";
    case MEMFERRY_FORKED: return "used in a child of the process that opened the device";
    case MEMFERRY_CAPTURING: return "not while a stream is captured into a graph";
    case MEMFERRY_ALREADY_REGISTERED: return "host memory is registered already";
    case MEMFERRY_NOT_REGISTERED: return "host memory is not registered";
    case MEMFERRY_BUSY: return "still in use";
    }
    return "unknown status";
}

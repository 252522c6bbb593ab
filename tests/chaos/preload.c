/* Preloaded into the server's processes: a clock that jumps, and a disk that is slow or full.

   SPACESERVE_CHAOS_STATE names a file of three int64: nanoseconds added to the calendar clock, microseconds that each
   write takes longer, and whether the disk is full. SPACESERVE_CHAOS_FOLDER is the folder whose files are meant. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static const int64_t none[3];
static const volatile int64_t *state = none;
static char folder[4096];
static size_t folder_length;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

__attribute__((constructor)) static void begin(void) {
    const char *file = getenv("SPACESERVE_CHAOS_STATE"), *where = getenv("SPACESERVE_CHAOS_FOLDER");
    int fd = file ? open(file, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0 || !where || strlen(where) >= sizeof folder) return;
    void *shared = mmap(NULL, sizeof none, PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (shared == MAP_FAILED) return;
    strcpy(folder, where);
    folder_length = strlen(folder);
    state = shared;
}

int clock_gettime(clockid_t clock, struct timespec *out) {
    static __typeof__(&clock_gettime) real;
    if (!real) real = REAL(clock_gettime);
    int result = real(clock, out);
    if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        int64_t nanoseconds = out->tv_nsec + state[0] % 1000000000, carry = state[0] / 1000000000;
        if (nanoseconds < 0) nanoseconds += 1000000000, carry -= 1;
        if (nanoseconds >= 1000000000) nanoseconds -= 1000000000, carry += 1;
        out->tv_sec += carry;
        out->tv_nsec = nanoseconds;
    }
    return result;
}

int gettimeofday(struct timeval *restrict out, void *restrict zone) {
    (void)zone;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    out->tv_sec = now.tv_sec, out->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}

/* Whether the write may be made; it is delayed, or refused with ENOSPC. */
static int may_write(int fd, int grows) {
    if (!state[1] && !state[2]) return 1;
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < (ssize_t)folder_length || strncmp(path, folder, folder_length)) return 1;
    if (state[1]) {
        struct timespec pause = {state[1] / 1000000, state[1] % 1000000 * 1000};
        syscall(SYS_nanosleep, &pause, NULL);
    }
    if (state[2] && grows) {
        errno = ENOSPC;
        return 0;
    }
    return 1;
}

#define WRITING(type, name, grows, parameters, ...)          \
    type name parameters {                                   \
        static __typeof__(&name) real;                       \
        if (!real) real = REAL(name);                        \
        return may_write(fd, grows) ? real(__VA_ARGS__) : -1; \
    }

WRITING(ssize_t, write, 1, (int fd, const void *data, size_t size), fd, data, size)
WRITING(ssize_t, pwrite, 1, (int fd, const void *data, size_t size, off_t at), fd, data, size, at)
WRITING(ssize_t, pwrite64, 1, (int fd, const void *data, size_t size, off64_t at), fd, data, size, at)
WRITING(ssize_t, writev, 1, (int fd, const struct iovec *parts, int number), fd, parts, number)
WRITING(int, fallocate, 1, (int fd, int mode, off_t from, off_t size), fd, mode, from, size)
WRITING(int, fallocate64, 1, (int fd, int mode, off64_t from, off64_t size), fd, mode, from, size)
WRITING(int, fsync, 0, (int fd), fd)
WRITING(int, fdatasync, 0, (int fd), fd)

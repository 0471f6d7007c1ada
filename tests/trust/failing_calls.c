/* Preloaded: makes the n-th call of one kind fail, of those that concern files below one directory.

   Armed from inside the process (faults.py, through ctypes), so that one preloaded process can fork all cases.
   error > 0: an errno. error < 0: reads and writes move half of what was asked for. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

/* In the order of KINDS in faults.py. */
enum { OPEN, READ, WRITE, FSYNC, TRUNCATE, ALLOCATE, RENAME, EXCHANGE, UNLINK, RMDIR, MKDIR, CLOSE, LOCK, LIST, STAT, KINDS };

enum { DESCRIPTORS = 1 << 16 };
static char below[4096];
static unsigned char ours[DESCRIPTORS];
static long counts[KINDS];
static int armed_kind = -1, armed_error, armed_for_good;
static long armed_call;
static __thread int halved;

void failing_calls_arm(const char *directory, int kind, long call, int error, int for_good)
{
    memset(counts, 0, sizeof counts);
    strncpy(below, directory, sizeof below - 1);
    armed_kind = kind, armed_call = call, armed_error = error, armed_for_good = for_good;
}

long failing_calls_count(int kind) { return counts[kind]; }

static int is_ours(int fd) { return fd >= 0 && fd < DESCRIPTORS && ours[fd]; }

static int concerns(int folder, const char *path)
{
    if (!below[0] || !path)
        return 0;
    return path[0] == '/' ? !strncmp(path, below, strlen(below)) : is_ours(folder);
}

static int remember(int fd, int concerned)
{
    if (fd >= 0 && fd < DESCRIPTORS)
        ours[fd] = concerned;
    return fd;
}

/* Whether this call has to fail; errno is set then. */
static int fails(int kind, int concerned)
{
    halved = 0;
    if (!concerned || !below[0])
        return 0;
    long call = __atomic_add_fetch(&counts[kind], 1, __ATOMIC_SEQ_CST);
    if (kind != armed_kind || (armed_for_good ? call < armed_call : call != armed_call))
        return 0;
    halved = armed_error < 0;
    if (!halved)
        errno = armed_error;
    return !halved;
}

static size_t asked(size_t count) { return halved && count > 1 ? count / 2 : count; }

static const struct iovec *first_half(const struct iovec *parts)
{
    static __thread struct iovec part;
    part = parts[0];
    part.iov_len = asked(part.iov_len);
    return halved ? &part : parts;
}

#define REAL(type, name, parameters) \
    static type (*real) parameters; \
    if (!real) \
        real = (type (*) parameters)dlsym(RTLD_NEXT, #name)

#define WRAP(type, name, parameters, kind, concerned, failure, ...) \
    type name parameters \
    { \
        REAL(type, name, parameters); \
        return fails(kind, concerned) ? failure : real(__VA_ARGS__); \
    }

#define WRAP_OPEN(name, parameters, folder, ...) \
    int name parameters \
    { \
        REAL(int, name, parameters); \
        int mode = 0, concerned = concerns(folder, path); \
        if (flags & (O_CREAT | O_TMPFILE)) { \
            va_list rest; \
            va_start(rest, flags); \
            mode = va_arg(rest, int); \
            va_end(rest); \
        } \
        return fails(OPEN, concerned) ? -1 : remember(real(__VA_ARGS__, flags, mode), concerned); \
    }

WRAP_OPEN(open, (const char *path, int flags, ...), AT_FDCWD, path)
WRAP_OPEN(open64, (const char *path, int flags, ...), AT_FDCWD, path)
WRAP_OPEN(openat, (int folder, const char *path, int flags, ...), folder, folder, path)
WRAP_OPEN(openat64, (int folder, const char *path, int flags, ...), folder, folder, path)

WRAP(ssize_t, read, (int fd, void *data, size_t count), READ, is_ours(fd), -1, fd, data, asked(count))
WRAP(ssize_t, pread, (int fd, void *data, size_t count, off_t at), READ, is_ours(fd), -1, fd, data, asked(count), at)
WRAP(ssize_t, pread64, (int fd, void *data, size_t count, off64_t at), READ, is_ours(fd), -1, fd, data, asked(count), at)
WRAP(ssize_t, write, (int fd, const void *data, size_t count), WRITE, is_ours(fd), -1, fd, data, asked(count))
WRAP(ssize_t, pwrite, (int fd, const void *data, size_t count, off_t at), WRITE, is_ours(fd), -1, fd, data, asked(count), at)
WRAP(ssize_t, pwrite64, (int fd, const void *data, size_t count, off64_t at), WRITE, is_ours(fd), -1, fd, data, asked(count), at)

#define VECTOR first_half(parts), halved ? 1 : count, at
WRAP(ssize_t, preadv, (int fd, const struct iovec *parts, int count, off_t at), READ, is_ours(fd), -1, fd, VECTOR)
WRAP(ssize_t, preadv64, (int fd, const struct iovec *parts, int count, off64_t at), READ, is_ours(fd), -1, fd, VECTOR)
WRAP(ssize_t, preadv2, (int fd, const struct iovec *parts, int count, off_t at, int how), READ, is_ours(fd), -1, fd, VECTOR, how)
WRAP(ssize_t, preadv64v2, (int fd, const struct iovec *parts, int count, off64_t at, int how), READ, is_ours(fd), -1, fd, VECTOR, how)

WRAP(int, fsync, (int fd), FSYNC, is_ours(fd), -1, fd)
WRAP(int, fdatasync, (int fd), FSYNC, is_ours(fd), -1, fd)
WRAP(int, ftruncate, (int fd, off_t size), TRUNCATE, is_ours(fd), -1, fd, size)
WRAP(int, ftruncate64, (int fd, off64_t size), TRUNCATE, is_ours(fd), -1, fd, size)
WRAP(int, fallocate, (int fd, int how, off_t at, off_t size), ALLOCATE, is_ours(fd), -1, fd, how, at, size)
WRAP(int, fallocate64, (int fd, int how, off64_t at, off64_t size), ALLOCATE, is_ours(fd), -1, fd, how, at, size)
WRAP(int, flock, (int fd, int how), LOCK, is_ours(fd), -1, fd, how)
WRAP(int, fstat, (int fd, struct stat *found), STAT, is_ours(fd), -1, fd, found)
WRAP(int, fstat64, (int fd, struct stat64 *found), STAT, is_ours(fd), -1, fd, found)
WRAP(DIR *, fdopendir, (int fd), LIST, is_ours(fd), NULL, fd)

WRAP(int, rename, (const char *path, const char *to), RENAME, concerns(AT_FDCWD, path), -1, path, to)
WRAP(int, renameat, (int from, const char *path, int into, const char *to), RENAME, concerns(from, path), -1, from, path, into, to)
WRAP(int, renameat2, (int from, const char *path, int into, const char *to, unsigned how), EXCHANGE, concerns(from, path), -1, from, path, into, to, how)
WRAP(int, unlink, (const char *path), UNLINK, concerns(AT_FDCWD, path), -1, path)
WRAP(int, unlinkat, (int folder, const char *path, int how), how & AT_REMOVEDIR ? RMDIR : UNLINK, concerns(folder, path), -1, folder, path, how)
WRAP(int, rmdir, (const char *path), RMDIR, concerns(AT_FDCWD, path), -1, path)
WRAP(int, mkdir, (const char *path, mode_t mode), MKDIR, concerns(AT_FDCWD, path), -1, path, mode)
WRAP(int, mkdirat, (int folder, const char *path, mode_t mode), MKDIR, concerns(folder, path), -1, folder, path, mode)
WRAP(int, stat, (const char *path, struct stat *found), STAT, concerns(AT_FDCWD, path), -1, path, found)
WRAP(int, stat64, (const char *path, struct stat64 *found), STAT, concerns(AT_FDCWD, path), -1, path, found)
WRAP(int, lstat, (const char *path, struct stat *found), STAT, concerns(AT_FDCWD, path), -1, path, found)
WRAP(int, lstat64, (const char *path, struct stat64 *found), STAT, concerns(AT_FDCWD, path), -1, path, found)
WRAP(int, fstatat, (int folder, const char *path, struct stat *found, int how), STAT, concerns(folder, path), -1, folder, path, found, how)
WRAP(int, fstatat64, (int folder, const char *path, struct stat64 *found, int how), STAT, concerns(folder, path), -1, folder, path, found, how)
WRAP(DIR *, opendir, (const char *path), LIST, concerns(AT_FDCWD, path), NULL, path)

/* As on Linux, the descriptor is gone whatever close says. */
int close(int fd)
{
    REAL(int, close, (int fd));
    int concerned = is_ours(fd);
    remember(fd, 0);
    int result = real(fd);
    return fails(CLOSE, concerned) ? -1 : result;
}

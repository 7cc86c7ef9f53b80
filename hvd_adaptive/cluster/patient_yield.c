/* Preloaded into ranks under a CPU quota (hvd_adaptive/cluster/patience.py): a thread of MPI or Horovod that waits sleeps.
 *
 * Both wait by asking and calling sched_yield in turns. Where nobody else wants the core, that is as busy as computing: under a CPU
 * quota it uses up what the rank's own work could have had. On Linux 6.18 threads that yield in turns have also kept the kernel's
 * own threads from running for a minute: the tests run with it for that.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Other callers, such as OpenMP's barriers, yield between two steps of one computation. */
static int waits_for_ranks(const void *caller) {
    static const char *const prefixes[] = {"libmpi", "libopen-pal", "mpi_lib"};
    Dl_info info;
    if (!dladdr(caller, &info) || !info.dli_fname) return 0;
    const char *slash = strrchr(info.dli_fname, '/');
    const char *name = slash ? slash + 1 : info.dli_fname;
    for (size_t i = 0; i < sizeof prefixes / sizeof *prefixes; i++)
        if (!strncmp(name, prefixes[i], strlen(prefixes[i]))) return 1;
    return 0;
}

static long now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000L + now.tv_nsec;
}

int sched_yield(void) {
    static __thread const void *known_caller;
    static __thread int sleeps;
    static __thread long begin_ns, end_ns;
    const void *caller = __builtin_return_address(0);
    if (caller != known_caller) {
        sleeps = waits_for_ranks(caller);
        known_caller = caller;
    }
    if (!sleeps) return (int)syscall(SYS_sched_yield);
    long now = now_ns();
    /* Who was away for longer did something else: a new wait begins. */
    if (now - end_ns > 20000) begin_ns = now;
    long waited_ns = now - begin_ns;
    if (waited_ns < 10000) {
        syscall(SYS_sched_yield);
    } else {
        /* At most an eighth late, and rarely awake where it takes long. The kernel adds 50 us. */
        long ns = waited_ns / 8;
        struct timespec pause = {0, ns < 20000 ? 20000 : ns > 300000 ? 300000 : ns};
        nanosleep(&pause, 0);
    }
    end_ns = now_ns();
    return 0;
}
